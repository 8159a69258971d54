"""What the warpgroups of a product with its sum do with tiles: multiply and encode them, add them up, receive them."""

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
from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic import tile_codec as blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.wire_io import WireWriter as Writer
from pallas_kernels.nvlink.deal import CTA
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.product import butterflies, halves, registers
from pallas_kernels.product.lines import RING, hear, tell
from pallas_kernels.product.plan import Plan
from pallas_kernels.product.sizes import FRAMES, PER, TILE_N

FACTOR = np.float32(1.0 / np.sqrt(TILE_N))  # of the orthonormal transform
OWN = RING + 2  # own frames that wait for their sum: told ones, one that is added up and one that is made


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
        return self.own_g.at[lax.axis_index(CTA), place, lax.rem(t, jnp.int32(OWN))]


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
