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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels import compat
from pallas_kernels.mosaic import blocks, rotation
from pallas_kernels.mosaic.tiling import ROWS
from pallas_kernels.mosaic.writer import WARPS, Writer, put_largest
from pallas_kernels.nvlink.deal import CTA, ROLE
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.nvlink.post import signal
from pallas_kernels.product import butterflies, halves, registers
from pallas_kernels.product.plan import Plan
from pallas_kernels.product.sizes import FRAMES, TILE_K, TILE_M, TILE_N
from pallas_kernels.product.unvaried import unvaried

WORKERS = 2  # warpgroups that multiply
PER = FRAMES // WORKERS  # frames of a tile that each of them has
FACTOR = np.float32(1.0 / np.sqrt(TILE_N))  # of the orthonormal transform
RING = 2  # tiles that one end of a line may be ahead of the other
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
        scratch[line] = scratch[f"{line}_taken"] = plgpu.Barrier(num_barriers=RING)
    scratch["own"] = scratch["own_taken"] = plgpu.Barrier(num_arrivals=plan.own, num_barriers=RING)
    scratch["own_taken"] = plgpu.Barrier(num_barriers=RING)

    def body(x_g, w_g, m_g, e_g, y_g, largest_g, terms_g, sums_g, own_g, *refs):
        s = dict(zip(scratch, refs))
        role, cta = lax.axis_index(ROLE), lax.axis_index(CTA)
        hands = Hands(plan, s, frames, terms_g, sums_g, own_g, lambda: e_g[0] if has_exponent else None)
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
            clerks = [functools.partial(load, plan, s, x_g, w_g, m_g)]
            clerks += [functools.partial(work, plan, s) for work in (announce_terms, announce_sums, watch)]

            @plgpu.warp_map
            def _(warp):
                for i, work in enumerate(clerks):
                    pl.when(warp == i)(work)

    body.__name__ = "nvlink_product_all_reduce"
    out = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((plan.m, plan.n), jnp.bfloat16),
            jax.ShapeDtypeStruct((plan.ctas * (WORKERS + 1), WARPS), jnp.int32),
            frames.buffer(ranks, plan.tiles * plan.own),
            frames.buffer(plan.tiles * FRAMES),
            jax.ShapeDtypeStruct((plan.ctas, plan.own, RING + 2, ROWS * TILE_N), jnp.float32),
        ],
        scratch_types=list(scratch.values()),
        grid=(plan.ctas,),
        grid_names=(CTA,),
        num_threads=WORKERS + 2,
        thread_name=ROLE,
        compiler_params=compat.compiler_params(),
    )(unvaried(x_MK), unvaried(w), halves.operand(), unvaried(exponent))
    return tuple(lax.optimization_barrier(out[:2]))


def load(plan: Plan, s: dict, x_g, w_g, m_g) -> None:
    """A warp's work: the operands of every step, as soon as there is a stage for them."""
    plgpu.copy_gmem_to_smem(m_g, s["matrix"], s["matrix_full"])

    def tile(t, carry):
        row, column = plan.corner(plan.tile(t))

        def step(k, carry):
            i = t * plan.steps_k + k
            stage = lax.rem(i, jnp.int32(plan.stages))
            pl.when(i >= plan.stages)(lambda: plgpu.barrier_wait(s["used"].at[stage]))
            inner, columns = pl.ds(k * TILE_K, TILE_K), pl.ds(column, TILE_N)
            w_tile = w_g.at[columns, inner] if plan.transposed else w_g.at[inner, columns]
            plgpu.copy_gmem_to_smem(x_g.at[pl.ds(row, TILE_M), inner], s["a"].at[stage], s["loaded"].at[stage])
            plgpu.copy_gmem_to_smem(w_tile, s["b"].at[stage], s["loaded"].at[stage])
            return carry

        return lax.fori_loop(0, plan.steps_k, step, carry)

    lax.fori_loop(0, plan.steps(), tile, 0)


def product(plan: Plan, s: dict, t, worker: int) -> jax.Array:
    """A warpgroup's half of tile t: float32[128, 128]."""
    stage_of = lambda k: lax.rem(t * plan.steps_k + k, jnp.int32(plan.stages))

    def accumulate(accumulator):
        def step(k, carry):
            stage = stage_of(k)
            plgpu.barrier_wait(s["loaded"].at[stage])
            a, b = s["a"].at[stage, pl.ds(worker * PER * ROWS, PER * ROWS)], s["b"].at[stage]
            _fence()
            plgpu.wgmma(accumulator, a, b.transpose((1, 0)) if plan.transposed else b)
            plgpu.wgmma_wait(1)
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(s["used"].at[stage_of(k - 1)]))
            return carry

        lax.fori_loop(0, plan.steps_k, step, 0)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(s["used"].at[stage_of(plan.steps_k - 1)])
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((PER * ROWS, TILE_N), jnp.float32))


def _fence() -> None:
    """Before every product of a loop: else ptxas puts one where it finds none, and serialises all products."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        nvvm.wgmma_fence_aligned()

    fence()


class InPlace(Frames):
    """Frames in global memory, of this rank or another one, that a warpgroup writes and reads from its registers."""

    def _codes(self, frame):
        return frame.at[pl.ds(0, self.code_bytes)]


class Hands:
    """What warpgroups do with tiles."""

    def __init__(self, plan: Plan, s: dict, frames: InPlace, terms_g, sums_g, own_g, exponent):
        self.plan, self.s, self.frames, self.exponent = plan, s, frames, exponent
        self.terms_g, self.sums_g, self.own_g = terms_g, sums_g, own_g

    def multiply(self, worker: int) -> jax.Array:
        """The products of a warpgroup; the largest |z| of what was encoded, as bits."""
        nothing = Writer.nothing(self.plan.tiling)
        return lax.fori_loop(0, self.plan.steps(), functools.partial(self.encode, worker), nothing)

    def encode(self, worker: int, t, largest):
        """Tile t as frames, the own one as it is."""
        plan, me = self.plan, self.plan.rank()
        y = product(plan, self.s, t, worker)
        for j in range(PER):
            f = worker * PER + j
            owner, place = f % plan.ranks, f // plan.ranks
            # Rounded as the product by itself would be.
            y_j = y[j * ROWS : (j + 1) * ROWS].astype(jnp.bfloat16).astype(jnp.float32)
            z = butterflies.transform(y_j) * FACTOR

            def keep(largest, z=z, place=place):
                registers.put(self._own(place, t), z)
                tell(self.s, "own", t)
                return largest

            def send(largest, z=z, owner=owner, place=place):
                there = plan.at(self.terms_g, owner).at[plan.sender(owner), plan.tile(t) * plan.own + place]
                return jnp.maximum(largest, self.frames.write(there, [z], self.exponent()))

            largest = lax.cond(me == owner, keep, send, largest)
        tell(self.s, f"terms_out{worker}", t)
        return largest

    def add_up(self, y_g) -> jax.Array:
        """Sums of the own frames of every tile; all frames of the one before as values."""
        steps = self.plan.steps()
        plgpu.barrier_wait(self.s["matrix_full"])

        def one(t, largest):
            largest = lax.cond(t < steps, lambda largest: self.combine(t, largest), lambda largest: largest, largest)
            pl.when(t > 0)(lambda: self.receive(y_g, t - 1))
            return largest

        return lax.fori_loop(0, steps + 1, one, Writer.nothing(self.plan.tiling))

    def combine(self, t, largest):
        """The sums of the own frames of tile t, to all."""
        plan, me = self.plan, self.plan.rank()
        hear(self.s, "own", t)
        hear(self.s, "terms_in", t)
        for place in range(plan.own):
            add_own = lambda total, place=place: registers.plus(total, self._own(place, t))
            total = plgpu.layout_cast(jnp.full((ROWS, TILE_N), -0.0, jnp.float32), plgpu.Layout.WGMMA)
            for k in range(plan.ranks - 1):
                total = lax.cond(me == k, add_own, lambda z: z, total)
                frame = self.terms_g.at[k + (me <= k).astype(jnp.int32), plan.tile(t) * plan.own + place]
                total = total + self.frames.values(frame, self.exponent())[0]
            total = lax.cond(me == plan.ranks - 1, add_own, lambda z: z, total)
            for there in plan.everywhere(self.sums_g, plan.tile(t) * FRAMES, place):
                largest = jnp.maximum(largest, self.frames.write(there, [total], self.exponent()))
        tell(self.s, "sums_out", t)
        return largest

    def receive(self, y_g, t) -> None:
        """Tile t of the result."""
        plan, tile = self.plan, self.plan.tile(t)
        row, column = plan.corner(tile)
        hear(self.s, "sums_in", t)

        def one(f, carry):
            frame = self.sums_g.at[tile * FRAMES + f]
            scale = self.frames.scales(frame, self.exponent())
            codes = self.frames.codes(frame)[0].astype(jnp.bfloat16)
            for half, y in enumerate(halves.transform(codes, self.s["matrix"])):
                y = blocks.scale_rows(plan.tiling, [y * FACTOR], scale)[0].astype(jnp.bfloat16)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the copy before has left this half's memory
                compat.store_tile(self.s["y"].at[half], y, rotation.transforms(jnp.bfloat16, halves.HALF), False)
                plgpu.commit_smem()
                there = pl.ds(row + f * ROWS, ROWS), pl.ds(column + half * halves.HALF, halves.HALF)
                plgpu.copy_smem_to_gmem(self.s["y"].at[half], y_g.at[there])
            return carry

        lax.fori_loop(0, FRAMES, one, 0)

    def _own(self, place: int, t):
        return self.own_g.at[lax.axis_index(CTA), place, lax.rem(t, jnp.int32(RING + 2))]


def tell(s: dict, line: str, t) -> None:
    """That all is done for tile t, on one of the lines between a warpgroup and another one or a clerk."""
    place = lax.rem(t, jnp.int32(RING))
    pl.when(t >= RING)(lambda: plgpu.barrier_wait(s[f"{line}_taken"].at[place]))
    plgpu.barrier_arrive(s[line].at[place])


def hear(s: dict, line: str, t) -> None:
    """Waits until it is told."""
    place = lax.rem(t, jnp.int32(RING))
    plgpu.barrier_wait(s[line].at[place])
    plgpu.barrier_arrive(s[f"{line}_taken"].at[place])


def announce_terms(plan: Plan, s: dict) -> None:
    """A warp's work: signals owners, once warpgroups have written the frames of a tile."""
    me = plan.rank()

    def one(t, carry):
        for worker in range(WORKERS):
            hear(s, f"terms_out{worker}", t)
        for own in range(plan.ranks):

            @pl.when(me == own)
            def _(own=own):
                others = [divmod(f, plan.ranks) for f in range(FRAMES) if f % plan.ranks != own]
                signal([plan.at(s["terms"], owner).at[place, plan.sender(owner)] for place, owner in others])

        return carry

    lax.fori_loop(0, plan.steps(), one, 0)


def announce_sums(plan: Plan, s: dict) -> None:
    """A warp's work: signals all, once the own frames of a tile are summed and sent."""

    def one(t, carry):
        hear(s, "sums_out", t)
        signal([there for place in range(plan.own) for there in plan.everywhere(s["sums"], 0, place)])
        return carry

    lax.fori_loop(0, plan.steps(), one, 0)


def watch(plan: Plan, s: dict) -> None:
    """A warp's work: waits for signals, which takes fences, and tells what has come in."""
    me, steps = plan.rank(), plan.steps()

    def one(t, carry):
        @pl.when(t < steps)
        def _():
            for place in range(plan.own):
                for k in range(plan.ranks - 1):
                    source = k + (me <= k).astype(jnp.int32)
                    pl.semaphore_wait(s["terms"].at[place, source], t + 1, decrement=False)
            tell(s, "terms_in", t)

        @pl.when(t > 0)
        def _():
            for f in range(FRAMES):
                pl.semaphore_wait(s["sums"].at[f], t, decrement=False)
            tell(s, "sums_in", t - 1)

        return carry

    lax.fori_loop(0, steps + 1, one, 0)
