"""Fused GPU kernels for the block codec, and `choose`, which says what runs an operation on a device.

This package imports nothing from `taco_jax`: it takes a `KernelSpec` and a device, and answers with the name of a
backend and the reason. `taco_jax/backend.py` asks, and owns the fallback, the pure `jnp` codec, which is the reference
that every kernel is tested against.

What is here, and what is not yet (`selection.NOT_BUILT` is the same account, as the code reads it):

| backend  | devices                         | encode  | reduce  | decode  |
|----------|---------------------------------|---------|---------|---------|
| `jnp`    | any; it lives in `taco_jax`     | yes     | yes     | yes     |
| `mosaic` | NVIDIA, compute capability 9.0+ | not yet | not yet | not yet |
| `triton` | NVIDIA, 8.0 to 8.9              | not yet | not yet | not yet |

The one-kernel collectives over NVLink are not built yet either.
"""

from pallas_kernels.selection import BACKENDS, OPERATIONS, KernelSpec, KernelUnavailableError, choose

__all__ = ["BACKENDS", "OPERATIONS", "KernelSpec", "KernelUnavailableError", "choose"]
