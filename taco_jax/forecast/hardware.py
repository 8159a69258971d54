"""GPUs by name: peak rates, memory and links, from their makers' data sheets.

The bf16 peaks are those of `taco_jax.train.metrics`, without sparsity, as all here.
"""

from __future__ import annotations

import dataclasses
import difflib
import statistics
import types

from pallas_kernels.dispatch import compute_capability
from taco_jax.errors import ConfigError
from taco_jax.train.metrics import bf16_peak

PREFIX = "NVIDIA "


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU. flops: dense bf16 FLOP/s; flops_fp8: 0 where it has none; flops_f32: without tensor cores.

    memory_gb_s, memory_gb: of its memory, 1e9 bytes. sms: multiprocessors. nvlink_gb_s: all its NVLinks together, one
    direction; 0 for none. assumed: what is no data sheet's figure.
    """

    name: str
    flops: float
    flops_fp8: float
    flops_f32: float
    memory_gb_s: float
    memory_gb: float
    sms: int
    nvlink_gb_s: float
    assumed: tuple[str, ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability that the name implies; None for a name that says nothing."""
        return compute_capability(types.SimpleNamespace(device_kind=PREFIX + self.name))

    @property
    def kernels(self) -> str:
        """The backend that encodes and decodes there: mosaic, triton or jnp, as `pallas_kernels.dispatch` chooses."""
        capability = self.capability
        if capability is None or capability < (8, 0):
            return "jnp"
        return "mosaic" if capability[0] == 9 else "triton"


# name: fp8 and f32 TFLOP/s, memory GB/s, memory GB, multiprocessors, NVLink GB/s in one direction. Sources: NVIDIA's
# data sheets and architecture white papers of each card. Another memory size of a card has a line of its own.
_SHEETS = {
    "GB200": (5000, 80, 8000, 186, 148, 900),
    "B200": (4500, 75, 8000, 180, 148, 900),
    "H200 NVL": (1671, 60, 4800, 141, 132, 450),
    "H200": (1979, 67, 4800, 141, 132, 450),
    "H100 PCIe": (1513, 51, 2000, 80, 114, 300),
    "H100 NVL": (1671, 60, 3900, 94, 132, 300),
    "H100 80GB HBM3": (1979, 67, 3350, 80, 132, 450),
    "H20": (296, 44, 4000, 96, 78, 450),
    "GH200": (1979, 67, 4000, 96, 132, 450),
    "A100 80GB": (0, 19.5, 2039, 80, 108, 300),
    "A100 40GB": (0, 19.5, 1555, 40, 108, 300),
    "A800": (0, 19.5, 2039, 80, 108, 200),
    "A40": (0, 37.4, 696, 48, 84, 56),
    "A30": (0, 10.3, 933, 24, 56, 100),
    "A10G": (0, 31.5, 600, 24, 80, 0),
    "A10": (0, 31.2, 600, 24, 72, 0),
    "L40S": (733, 91.6, 864, 48, 142, 0),
    "L40": (362, 90.5, 864, 48, 142, 0),
    "L4": (242, 30.3, 300, 24, 58, 0),
}
ALIASES = {"H100": "H100 80GB HBM3", "H100 SXM": "H100 80GB HBM3", "H200 SXM": "H200", "A100": "A100 80GB"}


def names() -> list[str]:
    """Every name that `find` takes."""
    return sorted([*_SHEETS, *ALIASES])


def _plain(name: str) -> str:
    words = name.upper().replace("NVIDIA", "").replace("_", " ").replace("-", " ").split()
    return " ".join(words)


def find(name: str) -> Gpu | None:
    """The GPU of a name, with or without NVIDIA before it, or of JAX's device_kind; None for a name not known."""
    plain = _plain(name)
    plain = _plain(ALIASES.get(plain, plain))
    by_name = {_plain(known): known for known in _SHEETS}
    if plain not in by_name:
        # A device_kind says more than the name: NVIDIA A100-SXM4-80GB. It must have all of a card's words.
        words = set(plain.replace("SXM4", "").replace("SXM", "").split())
        fits = [known for known in by_name if set(known.split()) <= words]
        if not fits:
            return None
        plain = max(fits, key=len)
    known = by_name[plain]
    fp8, f32, *rest = _SHEETS[known]
    sizes = dict(zip(("memory_gb_s", "memory_gb", "sms", "nvlink_gb_s"), rest, strict=True))
    return Gpu(known, bf16_peak(PREFIX + known), flops_fp8=fp8 * 1e12, flops_f32=f32 * 1e12, **sizes)


def gpu(name: str, tflops: float | None = None, memory_gb_s: float | None = None) -> Gpu:
    """The GPU of a name; of any name where its dense bf16 TFLOP/s are given.

    Raises:
      ConfigError: a name not known without `tflops`, with the nearest names; a rate that is not above 0.
    """
    for key, value in (("gpu-tflops", tflops), ("gpu-memory", memory_gb_s)):
        if value is not None and not 0 < value < 1e6:
            unit = "dense bf16 TFLOP/s, such as 121" if key == "gpu-tflops" else "GB/s, such as 300"
            raise ConfigError(f"--{key}={value:g}: must be above 0 and below 1e6, in {unit}")
    found = find(name)
    if found is None and tflops is None:
        close = nearest(name)
        raise ConfigError(
            f"--gpu {name!r}: no such GPU is known; nearest are {', '.join(close)}; for another give its dense bf16 "
            f"rate, --gpu-tflops 121 (and its memory's, --gpu-memory 300)"
        )
    if found is None:
        known = [find(other) for other in _SHEETS]
        per_byte = statistics.median(g.flops / g.memory_gb_s for g in known)
        per_sm = statistics.median(g.flops / g.sms for g in known)
        flops = tflops * 1e12
        assumed = () if memory_gb_s else ("the GPU's memory bandwidth: that of a usual card of its FLOP/s",)
        assumed += ("the GPU's multiprocessors: those of a usual card of its FLOP/s",)
        bandwidth = memory_gb_s or flops / per_byte
        return Gpu(
            name, flops, flops_fp8=0.0, flops_f32=flops / 8, memory_gb_s=bandwidth, memory_gb=0.0,
            sms=max(1, round(flops / per_sm)), nvlink_gb_s=0.0, assumed=assumed,
        )  # fmt: skip
    changes = {} if tflops is None else {"flops": tflops * 1e12}
    changes |= {} if memory_gb_s is None else {"memory_gb_s": memory_gb_s}
    return dataclasses.replace(found, **changes)


def nearest(name: str) -> list[str]:
    """Known names, those like `name` first: at most four."""
    plain = _plain(name)
    by_likeness = sorted(names(), key=lambda known: -difflib.SequenceMatcher(None, plain, _plain(known)).ratio())
    return by_likeness[:4]
