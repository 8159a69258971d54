"""y = sum over ranks of x @ w, the sum in a codec, in one kernel: tiles are rotated, quantised and sent as they finish.

Warps of a CTA. One CTA runs on each multiprocessor.

| warps | registers of a thread | do |
|---|---|---|
| warpgroups 0, 1 | 168 | multiply a half of each tile; send its frames to their owners, keep the own ones |
| warpgroup 2 | 136 | sum the own frames of a tile, to all; then decode all sums of the tile before |
| warp 0 of warpgroup 3 | 40 | load operands |
| warp 1 | 40 | signal the owners of what warpgroups 0 and 1 have sent |
| warp 2 | 40 | signal all ranks of what warpgroup 2 has sent |
| warp 3 | 40 | wait for the signals of other ranks |

Shared memory, 216 KB with the four stages of `Plan.operand_stages`.

| array | holds | barriers |
|---|---|---|
| x, w | [4, 256, 64], and [4, 64, 128] or [4, 128, 64] bfloat16, 48 KB a stage | operands_full, operands_empty |
| y | [2, 64, 64] bfloat16: halves of a frame on their way out, 16 KB | none: `wait_smem_to_gmem` |
| hadamard | [64, 64] bfloat16, 8 KB | hadamard_loaded |

Pipelines, of two barriers for each of two tiles (`shared_memory.Pipeline`).

| pipeline | from | to |
|---|---|---|
| terms_sent, two of them | warpgroup 0, 1 | warp 1 |
| own_terms | warpgroups 0, 1 | warpgroup 2 |
| terms_received, sums_received | warp 3 | warpgroup 2 |
| sums_sent | warpgroup 2 | warp 2 |

Global memory that peers write into: frames of terms and of sums; semaphores terms_signal [own frames, ranks], what came
from a rank to be summed, and sums_signal [frames], whether the sum is there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels import compat
from pallas_kernels.matmul_all_reduce import consumer, hadamard, producer
from pallas_kernels.matmul_all_reduce.consumer import OWN_TERM_TILES, ConsumerContext, GlobalFrameCodec
from pallas_kernels.matmul_all_reduce.plan import FRAME_ROWS, Plan
from pallas_kernels.matmul_all_reduce.shared_memory import MATMUL_WARPGROUPS, Scratch
from pallas_kernels.matmul_all_reduce.support import FRAMES_PER_TILE, TILE_N
from pallas_kernels.mosaic.wire_io import WARPS_PER_WARPGROUP, put_largest
from pallas_kernels.nvlink.tile_schedule import CTA_AXIS, ROLE_AXIS

# Registers of a thread. A multiprocessor has 512 for each of 128 lanes.
MATMUL_REGISTERS, SUM_REGISTERS, PRODUCER_REGISTERS = 168, 136, 40
CONSUMER_WARPGROUPS = MATMUL_WARPGROUPS + 1


def run(plan: Plan, x_MK: jax.Array, w: jax.Array, *, exponent: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns (y bfloat16[M, N], largest |z| as bits int32[*, 4]). exponent: int32[1] or None.

        warpgroups 0, 1, for each tile t:  y = x @ w, half of the tile, rounded to bfloat16
            for each frame of 64 rows:     z = H y; own frame: spill(z); else: encode(z) into the owner's memory
            arrive terms_sent, own_terms
        warpgroup 2, for each tile t:      wait own_terms, terms_received
            for each own frame:            total = sum in rank order of decode(frame), the own term as it is
                                           encode(total) into every rank's memory
            arrive sums_sent; wait sums_received of tile t - 1
            for each frame:                y = H decode(frame)
        producer warps:                    load operands; signal terms; signal sums; wait for signals

    The sum is float32. The owner's own term is unquantised: bfloat16, as the product is without this kernel.

    Deadlock-free: waits only go to earlier stages, and every buffer that peers write into holds a whole message.
    Requires all CTAs resident, so grid <= number of multiprocessors.
    """
    frames = GlobalFrameCodec(plan.frame_tiling)
    has_exponent = exponent is not None
    exponent = exponent if has_exponent else jnp.zeros((1,), jnp.int32)
    scratch_leaves, scratch_tree = jax.tree.flatten(Scratch.types(plan))

    def body(x_g, w_g, hadamard_g, exponent_g, y_g, largest_g, terms_g, sums_g, own_terms_g, *refs):
        s = scratch_tree.unflatten(refs)
        role, cta = lax.axis_index(ROLE_AXIS), lax.axis_index(CTA_AXIS)
        context = ConsumerContext(
            plan, s, frames, terms_g=terms_g, sums_g=sums_g, own_terms_g=own_terms_g,
            exponent=lambda: exponent_g[0] if has_exponent else None,
        )  # fmt: skip
        consumers = [functools.partial(consumer.multiply, context, i) for i in range(MATMUL_WARPGROUPS)]
        consumers.append(functools.partial(consumer.sum_and_receive, context, y_g))
        for i, work in enumerate(consumers):

            @pl.when(role == i)
            def _(i=i, work=work):
                registers = MATMUL_REGISTERS if i < MATMUL_WARPGROUPS else SUM_REGISTERS
                plgpu.set_max_registers(registers, action="increase")
                put_largest(largest_g.at[cta * CONSUMER_WARPGROUPS + i], work(), False)
                plgpu.wait_smem_to_gmem(0)

        @pl.when(role == CONSUMER_WARPGROUPS)
        def _():
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            producers = [
                functools.partial(producer.load_operands, plan, s, x_g=x_g, w_g=w_g, hadamard_g=hadamard_g),
                functools.partial(producer.signal_terms, plan, s),
                functools.partial(producer.signal_sums, plan, s),
                functools.partial(producer.watch_signals, plan, s),
            ]

            @plgpu.warp_map
            def _(warp):
                for i, work in enumerate(producers):
                    pl.when(warp == i)(work)

    body.__name__ = "nvlink_matmul_all_reduce"
    out = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.m, plan.n), jnp.bfloat16),
            jax.ShapeDtypeStruct((plan.ctas * CONSUMER_WARPGROUPS, WARPS_PER_WARPGROUP), jnp.int32),
            frames.global_type(plan.ranks, plan.tiles * plan.frames_per_owner),
            frames.global_type(plan.tiles * FRAMES_PER_TILE),
            jax.ShapeDtypeStruct((plan.ctas, plan.frames_per_owner, OWN_TERM_TILES, FRAME_ROWS * TILE_N), jnp.float32),
        ],
        scratch_types=scratch_leaves,
        grid=(plan.ctas,),
        grid_names=(CTA_AXIS,),
        num_threads=CONSUMER_WARPGROUPS + 1,
        thread_name=ROLE_AXIS,
        compiler_params=compat.compiler_params(),
    )(without_vma(x_MK), without_vma(w), hadamard.matrix_operand(), without_vma(exponent))
    return tuple(lax.optimization_barrier(out[:2]))


_vma_cast = Primitive("taco_jax_vma_cast")
_vma_cast.def_impl(lambda x: x)
_vma_cast.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype, sharding=x.sharding))
mlir.register_lowering(_vma_cast, lambda ctx, x: [x])


def without_vma(x: jax.Array) -> jax.Array:
    """Drops an array's varying mesh axes (VMA) without communication. The result may only go into a kernel.

    A warp by itself takes no refs of varying arrays (`mpmd_map`). Outputs of kernels are not typed as varying either.
    """
    return _vma_cast.bind(x)
