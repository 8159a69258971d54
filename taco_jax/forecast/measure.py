"""A short measurement on this machine's devices: one product, one copy, small kernels, one codec kernel, sums at two
sizes.

Sums: exact, the exchange of a compressed one and, where one kernel over NVLink can do it, that kernel with two codecs.

    python -m taco_jax.advise --measure [--devices cpu:4]

Takes less than a minute, most of it compiling. The result replaces the forecast's assumptions (`--link measured`). With
one device there is no link to measure. All devices of one process take part.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from taco_jax.errors import ConfigError
from taco_jax.forecast.constants import load

CODEC = "int8h"
KERNEL_CODECS = (CODEC, "int4h")
REPEATS, CALLS, CHAIN, SMALL = 5, 4, 4, 64
# (product's side, values copied and encoded, values of the two sums): a GPU's caches hold none of them.
SIZES = {"gpu": (8192, 1 << 26, (1 << 19, 1 << 25)), "cpu": (512, 1 << 18, (1 << 14, 1 << 18))}
KEYS = ("hardware", "gpu", "ranks", "product_flops", "product_share", "copy_gb_s", "codec_share", "link", "what")


def default_path() -> Path:
    """The file that `--link measured` reads."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "taco_jax" / "forecast.json"


def read(path: Path) -> dict[str, Any] | None:
    """Returns what was measured; None where there is no file.

    Raises:
      ConfigError: the file is none of `--measure`.
    """
    try:
        content = json.loads(path.read_text())
        _check(content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no measurement ({error}); make it anew with --measure, or delete it") from None
    return content


def _check(content: Any) -> None:
    """Raises ValueError for what `run` cannot have made."""
    if not isinstance(content, dict):
        raise ValueError("must be a JSON object")
    if missing := [key for key in KEYS if key not in content]:
        raise ValueError(f"lacks {', '.join(missing)}")
    for key in ("hardware", "gpu"):
        if not isinstance(content[key], str):
            raise ValueError(f"{key} must be a text")
    if not isinstance(content["what"], list) or not all(isinstance(text, str) for text in content["what"]):
        raise ValueError("what must be a list of texts")
    for key in ("product_flops", "product_share", "copy_gb_s", "codec_share"):
        if not _number(content[key]) > 0:
            raise ValueError(f"{key} must be a number above 0")
    if type(content["ranks"]) is not int or content["ranks"] < 1:
        raise ValueError("ranks must be an integer of at least 1")
    link = content["link"]
    if link is None:
        return
    for kind, more in (("exact", ()), ("hop", ()), ("kernel", ("ns",))):
        rate = link.get(kind) if isinstance(link, dict) else None
        if kind == "kernel" and rate is None:
            continue
        numbers = [_number(rate.get(key)) if isinstance(rate, dict) else -1.0 for key in ("gb_s", "us", *more)]
        if not (numbers[0] > 0 <= min(numbers[1:])):
            raise ValueError(f"link.{kind} is no rate")


def _number(value: Any) -> float:
    """Returns a finite number as it is, -1 for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else -1.0


def write(path: Path, found: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--measured {path}: cannot be written ({error.strerror}); name another file") from None


def run(devices: str | None = None) -> dict[str, Any]:
    """Measures and returns what `read` reads. devices: as the trainer's flag.

    Raises:
      ConfigError: there are no such devices, or several processes drive them.
    """
    import jax

    from taco_jax.config.device_selection import devices as chosen
    from taco_jax.config.device_selection import select_devices
    from taco_jax.forecast import hardware

    select_devices(devices)
    found = chosen(devices)
    if jax.process_count() > 1:
        raise ConfigError("--measure: needs one process that drives all its devices; start it without a launcher")
    device = found[0]
    side, values, sums = SIZES["cpu" if device.platform == "cpu" else "gpu"]
    flops, share = _product(device, side, hardware.find(device.device_kind))
    copy = _copy(device, values)
    start, host = _start(device)
    codec = _codec(device, values)
    link = _link(found, sums) if len(found) > 1 else None
    return {
        "hardware": f"{len(found)} x {device.device_kind}, jax {jax.__version__}",
        "gpu": device.device_kind, "ranks": len(found), "product_flops": flops, "product_share": share,
        "copy_gb_s": copy, "start_us": start, "host_us": host, "codec_share": codec / copy,
        "link": link,
        "what": [f"a product of {side:,} x {side:,}", "a copy", "small kernels", f"{CODEC}'s encoding"]
        + ([f"sums of {2 * sums[0]:,} and {2 * sums[1]:,} bytes"] if link else [])
        + (["the same in one kernel"] if link and link["kernel"] else []),
    }  # fmt: skip


def _seconds(function: Callable, *arguments) -> float:
    """Median seconds of a call, calls queued one after the other."""
    import jax

    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([function(*arguments) for _ in range(CALLS)])
        times.append((time.perf_counter() - start) / CALLS)
    return statistics.median(times)


def _product(device, side: int, gpu) -> tuple[float, float]:
    """(FLOP/s of a product of bf16, the share of the GPU's peak without the start of tiles; 1 of no known GPU)."""
    import jax
    import jax.numpy as jnp

    x = jax.device_put(jnp.ones((side, side), jnp.bfloat16), device)
    seconds = _seconds(jax.jit(lambda a, b: a @ b), x, x)
    flops = 2 * side**3 / seconds
    if gpu is None:
        return flops, 1.0
    from taco_jax.forecast.cost import Machine
    from taco_jax.forecast.links import given

    machine = Machine(gpu, given("1GB/s", 1.0, 0.0))
    expected = machine.product(side, side, side)
    # It was alone, at the clocks that nothing but multiplication leaves.
    expected *= machine.limit_of_power(2 * side**3, expected)
    return flops, load()["product"]["share_of_peak"] * expected / seconds


def _copy(device, values: int) -> float:
    """GB/s, read and written."""
    import jax
    import jax.numpy as jnp

    x = jax.device_put(jnp.ones(values, jnp.bfloat16), device)
    return 2 * x.nbytes / _seconds(jax.jit(jnp.copy), x) / 1e9


def _start(device) -> tuple[float, float]:
    """(microseconds from one small kernel to the next, from arrays of the host to a result there)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    x = jax.device_put(jnp.ones(1024, jnp.float32), device)

    def in_order(x):
        for _ in range(SMALL):
            x = jax.lax.optimization_barrier(x * 1.0001 + 1.0)
        return x

    one = jax.jit(lambda x, n: x[0] + n)

    def from_host(n):
        return np.asarray(one(x, jax.device_put(n, device)))

    return 1e6 * _seconds(jax.jit(in_order), x) / SMALL, 1e6 * _seconds(from_host, np.float32(1))


def _codec(device, values: int) -> float:
    """GB/s, read and written, of the encoding of one message."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import Geometry
    from taco_jax.codec import CODECS
    from taco_jax.compression import dispatch

    codec = CODECS[CODEC]
    x = jax.device_put(jnp.ones(values, jnp.bfloat16), device)
    geometry = Geometry(values, 1, values)
    seconds = _seconds(jax.jit(lambda x: dispatch.encode(codec, geometry, x)[0]), x)
    return (x.nbytes + codec.wire_bytes(values)) / seconds / 1e9


def _link(devices: list, sizes: tuple[int, int]) -> dict[str, dict[str, float] | None]:
    """Latency and rate of an exact sum, of one exchange of bytes and of one kernel's sum, from two sizes each."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import taco_jax
    from pallas_kernels import KernelUnavailableError
    from taco_jax.codec import CODECS
    from taco_jax.compression.compression import Compression

    ranks = len(devices)
    mesh = jax.make_mesh((ranks,), ("tp",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))

    def program(one):
        def body(x):
            for _ in range(CHAIN):
                x = one(x)
            return x

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))

    def put(values: int, dtype):
        zeros = jnp.zeros((ranks, values), dtype)
        return jax.device_put(zeros, NamedSharding(mesh, P("tp")))

    total = program(lambda x: lax.pcast(lax.psum(x, "tp"), "tp", to="varying"))
    swap = program(lambda x: lax.all_to_all(x.reshape(ranks, -1), "tp", 0, 0).reshape(x.shape))
    ring, hop = 2 * (ranks - 1) / ranks, (ranks - 1) / ranks
    exact = [(ring * 2 * n, _seconds(total, put(n, jnp.bfloat16)) / CHAIN) for n in sizes]
    bytes_ = [(hop * n, _seconds(swap, put(n // ranks * ranks, jnp.uint8)) / CHAIN) for n in sizes]

    def in_one_kernel(codec: str, values: int) -> float:
        over_nvlink = Compression(codec, link="nvlink", min_bytes=0)
        one = program(lambda x: lax.pcast(taco_jax.psum(x, "tp", compression=over_nvlink), "tp", to="varying"))
        return _seconds(one, put(values, jnp.bfloat16)) / CHAIN

    try:
        kernel = [(ring * CODECS[codec].wire_bytes(n), n, in_one_kernel(codec, n))
                  for codec in KERNEL_CODECS for n in sizes]  # fmt: skip
    except KernelUnavailableError:
        kernel = None
    return {"exact": _line(exact), "hop": _line(bytes_), "kernel": kernel and _kernel(kernel)}


def _kernel(points: list[tuple[float, int, float]]) -> dict[str, float]:
    """us, gb_s and ns of `links.Kernel` of (bytes sent, elements, seconds), by the least relative error."""
    import numpy as np
    from scipy.optimize import nnls

    terms = np.array([(1.0, sent, n) for sent, n, _ in points])
    seconds = np.array([t for *_, t in points])
    scale = terms.max(0)
    us, per_byte, per_element = nnls(terms / scale / seconds[:, None], np.ones(len(points)))[0] / scale
    return {"us": us * 1e6, "gb_s": 1e-9 / max(per_byte, 1e-15), "ns": per_element * 1e9}


def _line(points: list[tuple[float, float]]) -> dict[str, float]:
    (small, short), (large, long) = points
    per_byte = max(long - short, 1e-3 * long) / (large - small)
    return {"us": max(0.0, short - small * per_byte) * 1e6, "gb_s": 1e-9 / per_byte}
