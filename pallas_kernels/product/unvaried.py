"""The type of an array whose values differ from device to device, changed to that of one whose do not.

A warp by itself takes no refs of varying arrays (`mpmd_map`), which the outputs of kernels are not typed as either. The
result may go into a kernel and nowhere else.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

_unvaried = Primitive("unvaried")
_unvaried.def_impl(lambda x: x)
_unvaried.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype, sharding=x.sharding))
mlir.register_lowering(_unvaried, lambda ctx, x: [x])


def unvaried(x: jax.Array) -> jax.Array:
    """x, typed as if every device had the same."""
    return _unvaried.bind(x)
