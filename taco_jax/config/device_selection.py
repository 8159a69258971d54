"""Which devices JAX sees: the value of `--devices`, XLA's flags, and the memory of emulated devices.

All but `devices` happens before JAX starts a backend, so that `--devices cpu:8` can still choose one.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from taco_jax.errors import ConfigError

MAX_EMULATED = 4096
"""Devices on the CPU: each takes threads, and XLA starts all of them."""
COLLECTIVE_KERNELS = ("--xla_gpu_unsupported_use_all_reduce_one_shot_kernel",
                      "--xla_gpu_experimental_use_collective_kernels")  # fmt: skip
"""Flags of XLA's own kernels for exact sums: the one that every jax knows, and jax 0.11's."""
MALLOPT = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, 2**31 - 1), "M_ARENA_MAX": (-8, 1)}
"""Options of glibc's malloc.h, their numbers there and the values of `_keep_memory`."""


def parse_devices(devices: str | None) -> tuple[str | None, int | None]:
    """(platform, count) of a `devices` value: "cpu:8" -> ("cpu", 8), "gpu" -> ("gpu", None), None -> (None, None)."""
    if devices is None:
        return None, None
    match = re.fullmatch(r"(cpu|gpu|cuda)|cpu:([1-9]\d*)", devices)
    if not match:
        raise ConfigError(f"devices={devices!r}: must be 'cpu:N' (N emulated devices), 'cpu' or 'gpu'; try 'cpu:8'")
    count = int(match[2]) if match[2] else None
    if count is not None and count > MAX_EMULATED:
        raise ConfigError(f"devices={devices!r}: at most {MAX_EMULATED} devices are emulated; try 'cpu:8'")
    return (match[1] or "cpu").replace("gpu", "cuda"), count


def select_devices(devices: str | None, *, deterministic: bool = False, in_order: bool = False) -> None:
    """Makes JAX see the devices that a `devices` value names. Call it before anything starts a backend.

    "cpu:N" sets JAX_PLATFORMS and, in XLA_FLAGS, the number of emulated devices and a long rendezvous timeout: more
    devices than cores can take longer than XLA's 40 s to arrive at a collective, which then aborts the process. Other
    flags of the user stay, and so does their own timeout. It also keeps freed memory in the process (`_keep_memory`).
    `deterministic` makes GPU results repeat bit for bit. `in_order`: GPUs start kernels of all streams in the order of
    their launch.
    """
    platform, count = parse_devices(devices)
    flags = os.environ.get("XLA_FLAGS", "").split()

    def have(flag: str) -> bool:
        return any(f.startswith(flag) for f in flags)

    # All of these flags are known to every jax that this package supports; XLA aborts on one that it does not know.
    if count is not None:
        flags = [f for f in flags if not f.startswith("--xla_force_host_platform_device_count")]
        flags.append(f"--xla_force_host_platform_device_count={count}")
        if not have("--xla_cpu_collective_call_terminate_timeout_seconds"):
            flags.append("--xla_cpu_collective_call_terminate_timeout_seconds=600")
        _keep_memory()
    if deterministic:
        if not have("--xla_gpu_deterministic_ops"):
            flags.append("--xla_gpu_deterministic_ops=true")
        # NCCL's sums in the NVLink switch depend on how its memory came to lie.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0") and not any(map(have, COLLECTIVE_KERNELS)):
        # From jax 0.11 on XLA sums up to 4 MiB by kernels that write into peers' memory, whatever NCCL is told.
        flags.append(f"{COLLECTIVE_KERNELS[0]}=false")
    if in_order:
        # A matrix product fills the GPU. One that starts before the message beside it, on any rank, holds it up.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(flags)
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform
        if "jax" in sys.modules:
            # jax read JAX_PLATFORMS when it was imported; XLA reads its flags only when the backend starts.
            sys.modules["jax"].config.update("jax_platforms", platform)


def _keep_memory() -> None:
    """Makes malloc keep what a step frees for the next step, instead of giving it back to the kernel.

    XLA takes the temporaries of a program on each emulated device as one block. glibc maps blocks of 32 MB and more
    for themselves and unmaps them after use, so the kernel clears every page again at the next step: of the quickstart
    258,000 pages a step, a fifth of its time. Blocks of the heap stay; only the main arena's heap grows that large. A
    user's own MALLOC_* or GLIBC_TUNABLES have the last word.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or any(k.startswith("MALLOC_") for k in os.environ):
        return
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    for option, value in MALLOPT.values() if mallopt else ():
        mallopt(option, value)


def devices(name: str | None) -> list[Any]:
    """jax.devices(), which starts the backend; ConfigError where `devices` names one that this machine has not."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # without a word where no plugin for the platform is installed
        reason = " ".join(str(error).split())[:300] or "this jax has no such devices"
        where = f"devices={name!r}" if name else f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise ConfigError(f"{where}: cannot be used here ({reason}); try --devices cpu:8") from None
