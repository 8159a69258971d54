"""The one place that knows about differences between jax 0.10.2 and 0.12."""

from __future__ import annotations

import jax


def varying_axes(x) -> frozenset[str]:
    """The manual mesh axes over which x may differ between devices, as shard_map(check_vma=True) tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)
