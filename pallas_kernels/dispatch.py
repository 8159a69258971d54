"""Which implementation runs a codec operation on a device, and why: `choose(spec, device) -> (name, reason)`.

NVIDIA GPUs of compute capability 9.0 (Hopper) take mosaic kernels, and triton's where mosaic has none for the codec;
8.x, 10.x and 12.x take triton kernels; everything else the jnp reference. Mosaic's rotation is Hopper's matrix
instruction (wgmma), which newer GPUs do not have; its kernels without a rotation compile for 10.0, and have not run
there. Each kernel package answers `why_unsupported` by itself, without a GPU and without its compiler.

A `jax.Device` reports its compute capability. An abstract device (of a mesh that a function is traced for, with or
without that hardware in the machine) has only its name, so names of GPUs are listed here.
"""

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from pallas_kernels.formats import (
    CODEC_BLOCKS,
    ELEMENTS,
    KERNEL_ELEMENTS,
    ROTATIONS,
    ROUNDINGS,
    SCALES,
    TOKEN,
    Format,
    Geometry,
)

BACKENDS = ("jnp", "mosaic", "triton")
# Compute capabilities whose kernels Triton 3.6 compiles, beside Hopper's: PTX 8.8 has 10.1 for Thor, which is 11.0 now.
TRITON_MAJORS = (8, 10, 12)
OPERATIONS = ("encode", "reduce", "decode")
# Elements and blocks that only the jnp reference has, and why. The codec of a preset: `tah4`, `int8_token`.
ONLY_IN_JNP = {
    "int3_4": "element int3_4 chooses between 4 and 3 bits tile by tile, in order of their size: no kernel sorts tiles",
    **{name: f"element {name} has no kernel" for name in ELEMENTS if name not in KERNEL_ELEMENTS},
}
TOKENS = "codec {!r} has one scale a token, whose size may be any: kernels have blocks of a power of two"
_VALID = {
    "operation": OPERATIONS,
    "element": (*ELEMENTS, "int3_4", "none"),
    "rotation": ROTATIONS,
    "scale": SCALES,
    "rounding": ROUNDINGS,
}

# Codecs that stay with the jnp reference on every device.
NOTHING_TO_ENCODE = "codec 'none' sends the values as they are: there is nothing to encode"
NO_NAN = "scale 'site' needs a code for a non-finite value, and element {!r} has none"
PAPER = "codec 'taco_paper' is the paper to the letter, kept as a reference: it has no kernel by design"
SCALES_ONLY_IN_JNP = {"paper": PAPER} | {
    name: f"scale {name} has no kernel: kernels have scales of whole bytes" for name in ("e5m0", "e4m0")
}

# The first pattern that is in the name counts, so longer names come first.
_DEVICE_NAMES = (
    (r"\bT4\b|RTX 20\d\d|Quadro RTX", (7, 5)),
    (r"GB10\b", (12, 1)),
    (r"GB300|B300", (10, 3)),
    (r"GB200|B200|B100", (10, 0)),
    (r"GH200|H[128]00|H20Z?\b", (9, 0)),
    (r"RTX PRO \d+ Blackwell|RTX 50\d\d", (12, 0)),
    (r"\bThor\b", (11, 0)),  # 10.1 before CUDA 13
    (r"\bOrin\b", (8, 7)),
    (r"RTX \d+ Ada|RTX 40\d\d|\bL(4|20|40S?)\b", (8, 9)),
    (r"RTX A\d+|RTX 30\d\d|\bA(2|10G?|16|40)\b|\bA6000\b", (8, 6)),
    (r"\bA(30X?|100X?|800)\b", (8, 0)),
    (r"\bV100\b|Titan V", (7, 0)),
)


class KernelUnavailableError(RuntimeError):
    """A backend was forced that cannot run this operation on this device."""


@dataclass(frozen=True)
class KernelSpec:
    """One codec operation, as far as the choice of a kernel depends on it. Hashable; holds no array.

    `encode` turns x into wires; `reduce` decodes the wires of P ranks and adds them in f32 (with the own chunk in place
    of the own wire), and encodes the sum again or rotates it back; `decode` turns wires into x. `elements` counts the
    elements of x on one device (`reduce`: of one chunk); `geometry`, where it is known, says how they are cut into
    messages.
    """

    operation: str  # one of OPERATIONS
    codec_name: str  # preset name, or any label for a codec that is not a preset
    element: str  # "e4m3", "int8", "e2m1", ...
    block: int | str  # elements that share one scale; TOKEN: the last dim of x
    rotation: str  # "none", "hadamard", "signed_hadamard"
    scale: str  # "ue5m3", "bfloat16", "e8m0", "e5m0", "e4m0", "float32", "site", "paper"
    dtype: str  # dtype of x: "bfloat16", "float16", "float32"
    elements: int
    rounding: str = "nearest"  # "nearest", "stochastic"
    geometry: Geometry | None = None

    def __post_init__(self):
        for field, valid in _VALID.items():
            value = getattr(self, field)
            if value not in valid:
                raise ValueError(f"KernelSpec.{field}={value!r} is unknown; {_did_you_mean(value, valid)}")
        if self.block not in (*CODEC_BLOCKS, TOKEN):
            raise ValueError(f"KernelSpec.block={self.block} must be one of {', '.join(map(str, CODEC_BLOCKS))}")
        if self.elements < 0:
            raise ValueError(f"KernelSpec.elements={self.elements} must not be negative")

    @property
    def format(self) -> Format:
        return Format(self.element, self.block, self.rotation, self.scale, self.rounding)


def choose(spec: KernelSpec, device: Any, *, force: str | None = None) -> tuple[str, str]:
    """Returns the backend that runs `spec` on `device`, and the reason in one sentence.

    Args:
        spec: the operation.
        device: a `jax.Device`, or anything with its `platform` and `device_kind` (an abstract device), and maybe its
            `compute_capability`.
        force: a name of BACKENDS to take or to fail, None to choose.
    Returns:
        (name, reason); name is in BACKENDS.
    Raises:
        ValueError: `force` is not in BACKENDS.
        KernelUnavailableError: the forced backend cannot run `spec` on `device`; the message, one line, says why.

    Starts no backend and allocates nothing: it only reads attributes of `device`.
    """
    if force is not None and force not in BACKENDS:
        raise ValueError(f"backend {force!r} is unknown; {_did_you_mean(force, BACKENDS)}")
    if force == "jnp":
        return "jnp", "jnp was asked for"
    candidates, reason = _candidates(device)
    if force is not None:
        unsupported = _why_unsupported(force, spec) if force in candidates else _unfit(spec, candidates, reason)
        if unsupported is not None:
            raise KernelUnavailableError(
                f"backend {force!r} cannot {spec.operation} codec {spec.codec_name!r} on {describe(device)}: "
                f"{unsupported}; use backend 'auto' or 'jnp'"
            )
        return force, f"{force} was asked for"
    reasons = []
    for name in candidates:
        unsupported = _why_unsupported(name, spec)
        if unsupported is None:
            return name, "; ".join([reason.format(name), *reasons])
        if unsupported not in reasons:
            reasons.append(unsupported)
    return "jnp", "; ".join(reasons) or f"{reason}: the jnp reference runs"


def load(name: str) -> ModuleType:
    """Imports the kernel package of a backend, "mosaic" or "triton"."""
    if name not in BACKENDS[1:]:
        raise ValueError(f"backend {name!r} has no kernels; {_did_you_mean(name, BACKENDS[1:])}")
    return importlib.import_module(f"pallas_kernels.{name}")


def _candidates(device: Any) -> tuple[tuple[str, ...], str]:
    """Returns the kernel backends for this kind of device, best first, and the reason ("{}" is the backend's name)."""
    if device.platform == "cpu":
        return (), "CPU has no kernels"
    if device.platform not in ("gpu", "cuda"):
        return (), f"platform {device.platform!r} has no kernels"
    capability = compute_capability(device)
    if capability is None:
        return (), f"{describe(device)} is no NVIDIA GPU that is known here"
    if capability[0] == 9:
        return ("mosaic", "triton"), f"{describe(device)} runs {{}} kernels"
    if capability < (8, 0):
        return (), f"{describe(device)} is older than compute capability 8.0"
    if capability[0] not in TRITON_MAJORS:
        return (
            (),
            f"{describe(device)} is no target of Triton 3.6: its PTX 8.8 has none of {capability[0]}.x",
        )
    return ("triton",), f"{describe(device)} runs {{}} kernels"


def _unfit(spec: KernelSpec, candidates: tuple[str, ...], reason: str) -> str:
    """Returns why a device does not take a backend's kernels at all."""
    if not candidates:
        return reason
    rotates = "" if spec.rotation == "none" else ", whose matrix instruction (wgmma) rotates blocks"
    instead = "; triton would do" if _triton_missing() is None else ""
    return f"mosaic kernels need compute capability 9.0{rotates}{instead}"


def missing_package(device: Any) -> str | None:
    """Returns what the environment lacks for the kernels of this kind of device, where it has any; None otherwise."""
    return _triton_missing() if _candidates(device)[0] == ("triton",) else None


def _why_unsupported(backend: str, spec: KernelSpec) -> str | None:
    """Returns why `backend` cannot run `spec` on the devices that it is for; None if it can."""
    if spec.element == "none":
        return NOTHING_TO_ENCODE
    reason = only_in_jnp(spec.codec_name, spec.element, spec.block, spec.scale)
    if reason is not None:
        return reason
    if spec.scale == "site" and ELEMENTS[spec.element].nan is None:
        return NO_NAN.format(spec.element)
    if spec.elements == 0:
        return "there are no elements"
    package = importlib.util.find_spec(f"pallas_kernels.{backend}")
    if package is None or package.origin is None:  # no folder, or one that is no package
        return f"{backend} kernels are not built yet"
    if backend == "triton":
        return _triton_missing() or load(backend).why_unsupported(spec.format, spec.operation, spec.dtype)
    where = spec.elements if spec.geometry is None else spec.geometry
    return load(backend).why_unsupported(spec.format, spec.operation, spec.dtype, where)


def only_in_jnp(codec_name: str, element: str, block: int | str, scale: str) -> str | None:
    """Returns why a codec of these fields has no `Format`, and so no kernel on any device; None if it has one."""
    if scale in SCALES_ONLY_IN_JNP:
        return SCALES_ONLY_IN_JNP[scale]
    return TOKENS.format(codec_name) if block == TOKEN else ONLY_IN_JNP.get(element)


def _triton_missing() -> str | None:
    """Returns what the environment lacks for jax-triton 0.3, which is for jax below 0.12; 0.4 is called otherwise."""
    if jax.__version_info__ >= (0, 12):
        return f"triton kernels need jax below 0.12 (they are for jax-triton 0.3), and this is {jax.__version__}"
    for module, package in (("jax_triton", "jax-triton"), ("triton", "triton")):
        if importlib.util.find_spec(module) is None:
            return f"triton kernels need {package}: pip install 'taco-jax[triton]'"
    found = _release("jax-triton")
    if found is not None and not found.startswith("0.3."):
        return f"triton kernels need jax-triton 0.3, and {found} is installed: pip install 'taco-jax[triton]'"
    return None


@functools.cache
def _release(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _did_you_mean(name: Any, valid: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(name), valid, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + "valid: " + ", ".join(valid)


def compute_capability(device: Any) -> tuple[int, int] | None:
    """Returns (major, minor) of an NVIDIA GPU; None for others (AMD reports names such as gfx942) and unknown names."""
    reported = getattr(device, "compute_capability", None)
    if reported is None:
        name = str(getattr(device, "device_kind", ""))
        return next((found for pattern, found in _DEVICE_NAMES if re.search(pattern, name, re.IGNORECASE)), None)
    match = re.fullmatch(r"(\d+)\.(\d+)", str(reported))
    return (int(match[1]), int(match[2])) if match else None


def describe(device: Any) -> str:
    """Returns the device's name, with its compute capability where it has one."""
    kind = getattr(device, "device_kind", device.platform)
    capability = compute_capability(device)
    return f"{kind} (compute capability {capability[0]}.{capability[1]})" if capability else str(kind)


def region_device():
    """Returns the device that is traced for: that of the region's mesh, or the first one where there is none.

    A mesh knows its devices by kind only (an abstract device), which may be another machine's; where this machine has
    one of that kind it is returned, because it says more.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    devices = jax.local_devices()
    if abstract is None:
        return devices[0]
    same = [d for d in devices if (d.platform, d.device_kind) == (abstract.platform, abstract.device_kind)]
    return same[0] if same else abstract
