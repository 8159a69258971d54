"""Fused GPU kernels for the block codec, and `choose`, which says what runs an operation on a device.

This package imports nothing from `taco_jax`: it takes a `KernelSpec` and a device, and answers with the name of a
backend and the reason. `taco_jax/compression/dispatch.py` asks, and owns the fallback, the pure `jnp` codec, which
is the reference that every kernel is tested against.

| backend  | devices                                           | is in                                    |
|----------|---------------------------------------------------|------------------------------------------|
| `mosaic` | NVIDIA, compute capability 9.0 (Hopper)           | `pallas_kernels.mosaic`                  |
| `triton` | other NVIDIA from 8.0 on, and what mosaic has not | `pallas_kernels.triton` (extra `triton`) |
| `jnp`    | any                                               | `taco_jax`                               |

A kernel package is imported by `load` when it is first used. It holds `encode`, `reduce_encode`, `reduce_decode`,
`sum_decode`, `decode`, and `why_unsupported`, which says what it cannot do.
"""

from pallas_kernels.dispatch import BACKENDS, OPERATIONS, KernelSpec, KernelUnavailableError, choose, load
from pallas_kernels.formats import Format, Geometry

__all__ = ["BACKENDS", "OPERATIONS", "Format", "Geometry", "KernelSpec", "KernelUnavailableError", "choose", "load"]
