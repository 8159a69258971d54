"""y = sum over ranks of x @ w, the sum in a codec, in one kernel: tiles are rotated, quantised and sent as they finish.

While the next tiles are multiplied, a warpgroup of its own sums the frames that come in from other ranks, sends the
sums to all, and makes the result of those that come in.

| warpgroups | do |
|---|---|
| 0, 1 | half of a tile's product each; its frames to their owners, the own one as it is |
| 2 | the sum of the own frame of a tile, to all; then all frames of the tile before, as values |
| 3 | clerks, a warp each: loads operands; signals what 0 and 1 have sent; what 2 has sent; watches for what comes in |

The sum is float32, in rank order, the owner's own term as it is (bfloat16, as the product would be without the kernel).
Nobody waits for what comes later than what he has sent, and buffers hold everything, so there is always somebody who
can go on, if all CTAs run at the same time: there are not more than multiprocessors.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.wire_io import WARPS_PER_WARPGROUP as WARPS
from pallas_kernels.mosaic.wire_io import put_largest
from pallas_kernels.nvlink.deal import CTA, ROLE
from pallas_kernels.product import clerks, halves, lines
from pallas_kernels.product.hands import OWN, Hands, InPlace
from pallas_kernels.product.plan import Plan
from pallas_kernels.product.sizes import FRAMES, TILE_K, TILE_M, TILE_N, WORKERS
from pallas_kernels.product.unvaried import unvaried

# Of 512 for each of 128 lanes.
WORKERS_REGISTERS, SUMMER_REGISTERS, CLERKS_REGISTERS = 168, 136, 40


def run(plan: Plan, x_MK: jax.Array, w: jax.Array, exponent) -> tuple[jax.Array, jax.Array]:
    """(y bfloat16[M, N], largest |z| as bits int32[*, 4]). exponent: int32[1] or None."""
    frames, ranks = InPlace(plan.tiling), plan.ranks
    has_exponent = exponent is not None
    exponent = exponent if has_exponent else jnp.zeros((1,), jnp.int32)
    swizzled = rotation.transforms(jnp.bfloat16, TILE_K)
    w_tile = (TILE_N, TILE_K) if plan.transposed else (TILE_K, TILE_N)
    scratch = {
        "a": plgpu.SMEM((plan.stages, TILE_M, TILE_K), jnp.bfloat16, transforms=swizzled),
        "b": plgpu.SMEM((plan.stages, *w_tile), jnp.bfloat16, transforms=swizzled),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=plan.stages),
        "used": plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
        "y": plgpu.SMEM((2, ROWS, halves.HALF), jnp.bfloat16, transforms=swizzled),
        "matrix": halves.scratch(),
        "matrix_full": plgpu.Barrier(),
        # Of the own frames: what came from a rank to be summed. Of all: that the sum is there.
        "terms": plgpu.SemaphoreType.REGULAR((plan.own, ranks)),
        "sums": plgpu.SemaphoreType.REGULAR((FRAMES,)),
    }
    for line in ("terms_out0", "terms_out1", "sums_out", "terms_in", "sums_in"):
        scratch |= lines.scratch(line)
    scratch |= lines.scratch("own", tellers=plan.own)

    def body(x_g, w_g, m_g, e_g, y_g, largest_g, terms_g, sums_g, own_g, *refs):
        s = dict(zip(scratch, refs))
        role, cta = lax.axis_index(ROLE), lax.axis_index(CTA)
        hands = Hands(
            plan, s, frames, terms_g, sums_g=sums_g, own_g=own_g, exponent=lambda: e_g[0] if has_exponent else None
        )
        roles = [*[functools.partial(hands.multiply, i) for i in range(WORKERS)], functools.partial(hands.add_up, y_g)]
        for i, work in enumerate(roles):

            @pl.when(role == i)
            def _(i=i, work=work):
                most = WORKERS_REGISTERS if i < WORKERS else SUMMER_REGISTERS
                plgpu.set_max_registers(most, action="increase")
                put_largest(largest_g.at[cta * len(roles) + i], work(), False)
                plgpu.wait_smem_to_gmem(0)

        @pl.when(role == len(roles))
        def _():
            plgpu.set_max_registers(CLERKS_REGISTERS, action="decrease")
            works = [functools.partial(clerks.load, plan, s, x_g, w_g, m_g)]
            for work in (clerks.announce_terms, clerks.announce_sums, clerks.watch):
                works.append(functools.partial(work, plan, s))

            @plgpu.warp_map
            def _(warp):
                for i, work in enumerate(works):
                    pl.when(warp == i)(work)

    body.__name__ = "nvlink_product_all_reduce"
    out = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.m, plan.n), jnp.bfloat16),
            jax.ShapeDtypeStruct((plan.ctas * (WORKERS + 1), WARPS), jnp.int32),
            frames.buffer(ranks, plan.tiles * plan.own),
            frames.buffer(plan.tiles * FRAMES),
            jax.ShapeDtypeStruct((plan.ctas, plan.own, OWN, ROWS * TILE_N), jnp.float32),
        ],
        scratch_types=list(scratch.values()),
        grid=(plan.ctas,),
        grid_names=(CTA,),
        num_threads=WORKERS + 2,
        thread_name=ROLE,
        compiler_params=compat.compiler_params(),
    )(unvaried(x_MK), unvaried(w), halves.operand(), unvaried(exponent))
    return tuple(lax.optimization_barrier(out[:2]))
