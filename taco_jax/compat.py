"""The one place that knows about differences between jax 0.10.2 and 0.12."""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax import lax


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which x may differ between devices, as shard_map(check_vma=True) tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def barrier(*xs: jax.Array) -> tuple[jax.Array, ...]:
    """lax.optimization_barrier for values that vary over different axes. jax 0.10 has none: there they stay apart."""
    if jax.__version_info__ < (0, 11) and len({varying_axes(x) for x in xs}) > 1:
        return xs
    return tuple(lax.optimization_barrier(xs))


def as_varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """x typed varying over `axes` too; a no-op where it is already. Its transpose is a psum over the added axes."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
