"""Messages between stages: activations to the next stage, their gradients back, each with a codec of its own.

The message is `taco_jax.ppermute` at site `pp/act`: every rank of a stage sends its x to the same rank of the next one,
`codec.wire_bytes(x.size)` bytes a tick, empty ticks too (a permutation is one program for all ranks).

Dims: B batch, L length, D model, K slot width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import collectives
from taco_jax.compression.compression import Compression, as_compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.config import TrainConfig
from taco_jax.models.run_config import Parallel

AXIS = "pp"
SITE = "pp/act"


def plan(config: TrainConfig) -> dict[str, Compression | None]:
    """Returns how the site of a config's stages is compressed, as in `Plan.resolve`; empty without stages.

    Messages of every size are, unless compression.min_bytes is set: what is tuned is tuned for sums over tp.
    """
    if config.mesh.pp == 1:
        return {}
    c, p = config.compression, config.pipeline
    compression = Compression(
        p.forward, backward=p.backward, min_bytes=c.min_bytes or 0, backend=c.backend, chunks=c.chunks or 1
    )  # fmt: skip
    return {SITE: as_compression(compression)}


def neighbours(stages: int, *, ring: bool) -> tuple[tuple[int, int], ...]:
    """(source, destination) of every message; a ring also leads from the last stage to the first."""
    return tuple((stage, (stage + 1) % stages) for stage in range(stages if ring else stages - 1))


def send(x_BLD: jax.Array, scales: SiteScales | None, sends, receives, par: Parallel, *, ring: bool) -> jax.Array:
    """x_BLD of the stage before this one.

    sends, receives: bool scalars: whether what this stage sends, and what it receives, is work. The measures of
    messages that are none stay zero: that of the forward message is taken where it is sent, and that of the gradient
    where that is sent, which is where x is received.
    """
    perm = neighbours(lax.axis_size(AXIS), ring=ring)
    scales = masked(scales, jnp.stack([sends, receives]))
    return collectives.ppermute(x_BLD, AXIS, perm, compression=par.compression(SITE), scales=scales, site=SITE)


def masked(scales: SiteScales | None, live) -> SiteScales | None:
    """The scales of a use that counts only where `live`, a bool scalar or one for each direction: elsewhere the slot's
    cotangent is zero."""
    if scales is None or scales.slot is None:
        return scales
    live = jnp.reshape(live, (-1, 1)) if jnp.ndim(live) else live
    return scales._replace(slot=jnp.where(live, scales.slot, 0))
