"""The levels of a reduction over the data-parallel axis: which ranks, and in which codec.

`sdp4` is SDP4Bit's (arXiv 2410.15526): gradients are summed in 8 bits by the ranks inside a host, whose links are fast,
then in 4 bits between hosts. Each level is a collective of its own here, with buckets and codecs of its own, so the two
are two axes, of a second mesh over the same devices in the same order; which ranks share a host is decided in
`collectives/topology.py`, as for the collectives that go in levels by themselves.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import AxisType, Mesh

from taco_jax.codec import Codec, as_codec
from taco_jax.collectives.topology import ranks_per_host

SDP4 = "sdp4"
INSIDE, BETWEEN = "int8h", "int4h"
OUTER, INNER = "dp_out", "dp_in"


@dataclasses.dataclass(frozen=True)
class Level:
    """One reduction: over `ranks` devices along `axis`."""

    axis: str
    ranks: int
    codec: Codec


@dataclasses.dataclass(frozen=True)
class Levels:
    """How gradients are summed. mesh: what they are summed on. axis: all of its data-parallel axes, as specs name them.
    levels: in the order of sending, the innermost first."""

    mesh: Mesh
    axis: str | tuple[str, str]
    levels: tuple[Level, ...]

    @property
    def codecs(self) -> list[str]:
        return sorted({level.codec.name for level in self.levels})


def choose(gradients: str, mesh: Mesh, devices_per_host: int | None = None) -> Levels:
    """The levels of the setting `data_parallel.gradients` on a mesh with axes dp, pp, tp."""
    dp = mesh.shape["dp"]
    if gradients != SDP4:
        return Levels(mesh, "dp", (Level("dp", dp, as_codec(gradients)),))
    inside = ranks_per_host(mesh, "dp", devices_per_host)
    if inside in (1, dp):
        return Levels(mesh, "dp", (Level("dp", dp, as_codec(INSIDE if inside == dp else BETWEEN)),))
    shape = (dp // inside, inside, *mesh.devices.shape[1:])
    names = (OUTER, INNER, *mesh.axis_names[1:])
    split = Mesh(mesh.devices.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))
    levels = (Level(INNER, inside, as_codec(INSIDE)), Level(OUTER, dp // inside, as_codec(BETWEEN)))
    return Levels(split, (OUTER, INNER), levels)
