"""The loop that every kernel runs: tiles come in ahead of time, are worked on, and go out behind.

One block of 128 threads (a CTA) takes tiles cta, cta + ctas, ...; `stages` tiles of input are in flight.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic.tiling import MAX_CTAS

AXIS = "cta"


def grid(tiles: int) -> int:
    """The number of CTAs."""
    return min(tiles, MAX_CTAS)


def run(tiles: int, stages: int, load, work, carry):
    """load(tile, slot) starts the copies of a tile; work(tile, slot, parity, free, carry) -> carry uses them.

    `work` calls free() as soon as it has read the slot, which starts the copies of the tile that comes next into it;
    `parity` alternates 0, 1 for the outgoing buffers.
    """
    ctas, cta = grid(tiles), lax.axis_index(AXIS)
    steps = lax.div(tiles - cta + ctas - 1, jnp.int32(ctas))
    for s in range(stages):

        @pl.when(s < steps)
        def _(s=s):
            load(cta + s * ctas, s)

    def body(k, carry):
        slot = lax.rem(k, jnp.int32(stages))

        def free():
            @pl.when(k + stages < steps)
            def _():
                load(cta + (k + stages) * ctas, slot)

        return work(cta + k * ctas, slot, lax.rem(k, jnp.int32(2)), free, carry)

    return lax.fori_loop(0, steps, body, carry)


def call(body, inputs, out_type, scratch, ctas: int, interpret=None):
    """The kernel `body(*input refs, *output refs, *scratch refs)` on `ctas` CTAs of one warpgroup."""
    options = {} if interpret is None else {"interpret": interpret}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(ctas,),
        grid_names=(AXIS,),
        compiler_params=compat.compiler_params(),
        **options,
    )(*inputs)
