"""The device mesh of a run: axes dp x pp x tp, tp innermost so that its ranks are neighbours on the fastest link."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, Mesh

AXES = ("dp", "pp", "tp")


def make_mesh(dp: int = 1, pp: int = 1, tp: int = 1, devices: list | None = None) -> Mesh:
    """A mesh over the first dp * pp * tp devices (default: `jax.devices()`), row-major, axis types Auto.

    Raises ValueError where there are fewer devices than that.
    """
    devices = jax.devices() if devices is None else devices
    size = dp * pp * tp
    if size > len(devices):
        kind, verb = devices[0].platform, "is" if len(devices) == 1 else "are"
        raise ValueError(
            f"mesh: dp {dp} x pp {pp} x tp {tp} needs {size} devices, there {verb} {len(devices)} ({kind}); "
            f"make the mesh smaller, or emulate with --devices cpu:{size}"
        )
    return jax.make_mesh((dp, pp, tp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:size])
