"""The loop that every kernel runs: tiles come in ahead of time, are worked on, and go out behind.

A CTA of a few warpgroups stays on each multiprocessor. Every warpgroup is a worker of its own, with `stages` tiles of
input in flight, and shares only the rotation's matrices with the others. While one waits for memory, another computes.
Worker i begins with tiles i, i + workers, ...; where there are many tiles the dynamic tile scheduler gives it the rest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels import compat
from pallas_kernels.mosaic.tiling import SMEM_BYTES, Tiling

# An axis of the mesh with the same name would be taken for it.
CTA, WARPGROUP = "taco_jax_cta", "taco_jax_warpgroup"
# Multiprocessors of an H100 or H200; where there are more they idle, where there are fewer CTAs queue.
MAX_CTAS = 132
# Setting the scheduler's counter to zero takes about 2 us, which a kernel of that many tiles a worker wins back.
MIN_DYNAMIC_TILES_PER_WORKER = 16


@dataclass(frozen=True)
class Workers:
    """The number of workers, and the order in which they take tiles."""

    tiles: int
    warpgroups: int
    may_be_dynamic: bool
    interpret: Any = None  # what `plgpu.kernel` takes: None on a GPU

    @property
    def ctas(self) -> int:
        """Returns the fewest CTAs of which none has more tiles than with MAX_CTAS.

        Beside a message, NCCL's kernel holds a few multiprocessors. A CTA that finds none waits until another ends, and
        all its tiles come after that: sums of int4h took 42 us instead of 18 (2 x H200, host memory).
        """
        tiles_per_cta = -(-self.tiles // MAX_CTAS)
        return -(-self.tiles // tiles_per_cta)

    @property
    def count(self) -> int:
        return self.ctas * self.warpgroups

    @property
    def dynamic(self) -> bool:
        """Returns whether the dynamic tile scheduler hands out the tiles. The interpreter knows no counter."""
        able = self.may_be_dynamic and compat.KERNELS_TAKE_REFS and self.interpret is None
        return able and self.tiles >= MIN_DYNAMIC_TILES_PER_WORKER * self.count

    def warpgroup(self):
        """Returns the index of this warpgroup in its CTA."""
        return lax.axis_index(WARPGROUP) if self.warpgroups > 1 else jnp.int32(0)

    def index(self):
        """Returns the index of this worker: neighbouring tiles go to different CTAs."""
        return self.warpgroup() * self.ctas + lax.axis_index(CTA)

    def steps(self, items: int):
        """Returns how many of `items` this worker takes."""
        return lax.div(items - self.index() + self.count - 1, jnp.int32(self.count))

    def for_each(self, items: int, body) -> None:
        """Runs body(i) for every i < items, shared among the workers."""

        def step(k, carry):
            body(self.index() + k * self.count)
            return carry

        lax.fori_loop(0, self.steps(items), step, 0)


class TileScheduler:
    """The dynamic tile scheduler of one warpgroup: numbers of a counter in global memory, one for each further tile.

    Multiprocessors get unequal shares of the memory's bandwidth: in a static order the last tiles wait 5 to 9 %
    of the time for the slowest multiprocessor. A number takes the memory's latency, and all threads of a
    warpgroup need it: so it is requested when a tile's work begins, published in shared memory ahead of the barrier
    that is there anyway, and used a tile later.

    counter_g: int32[1], zero when the kernel starts. numbers_s: the warpgroup's own int32[2].
    """

    def __init__(self, counter_g, numbers_s):
        self.counter_g, self.numbers_s = counter_g, numbers_s

    @staticmethod
    def scratch(warpgroups: int):
        return plgpu.SMEM((warpgroups, 2), jnp.int32)

    def request(self):
        """Returns the next number, in the leading thread alone, which does not wait for it yet; in others nothing."""
        result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
        def add(ctx, counter):
            i32 = ir.IntegerType.get_signless(32)
            operands = [mgpu.utils.memref_ptr(counter), _is_leader()]
            text = "{ mov.u32 $0, 0; @$2 atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
            number = llvm.inline_asm(i32, operands, text, "=&r,l,b", has_side_effects=True)
            return mgpu.FragmentedArray.splat(number, (), is_signed=True)

        return add(self.counter_g)

    def publish(self, k, number) -> None:
        """Writes number k (-1, 0, ...) where all threads find it behind their next barrier, before `number(k + 2)`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def store(ctx, numbers, array):
            address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(numbers))
            operands = [address, array.registers.item(), _is_leader()]
            text = "@$2 st.shared.u32 [$0], $1;"
            llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, "r,r,b", has_side_effects=True)

        store(self.numbers_s.at[lax.rem(k + 2, jnp.int32(2))], number)

    def number(self, k):
        """Returns number k, in all threads, after a barrier behind `publish`."""
        return self.numbers_s[lax.rem(k + 2, jnp.int32(2))]


def fit(
    tiling: Tiling,
    shared_bytes: int,
    stage_bytes: int,
    other_bytes: int,
    *,
    stages: tuple[int, ...],
    enough: int,
    most: int,
    may_be_dynamic: bool,
) -> tuple[Workers, int]:
    """Returns workers of up to `most` warpgroups, and the first of `stages` that leaves shared memory for `enough`.

    Bytes of shared memory: `shared_bytes` for all of a CTA's warpgroups, for each `stage_bytes` a stage and
    `other_bytes`. Where no number of stages leaves enough, it is the last.
    """
    wanted = max(1, min(most, -(-tiling.tiles // MAX_CTAS)))
    for count in stages:
        room = (SMEM_BYTES - shared_bytes) // (count * stage_bytes + other_bytes)
        if room >= min(enough, wanted):
            break
    return Workers(tiling.tiles, max(1, min(wanted, room)), may_be_dynamic, tiling.interpret), count


def run(workers: Workers, stages: int, load, work, carry, begin, scheduler: TileScheduler | None):
    """Runs load(tile, slot), which starts the copies of a tile, and work(tile, slot, parity, free, carry) -> carry.

    `work` calls free() as soon as it has read the slot, which starts the copies of the tile that comes next into it;
    `parity` alternates 0, 1 for the outgoing buffers. begin() runs when the first copies are on their way.

    Mosaic sets no barriers (`compat.compiler_params`). Of one warpgroup's threads, those that matter are here, before
    copies that overwrite what others may still read, in `wait_smem_to_gmem` and in `commit_smem`.
    """
    first, stride = workers.index(), workers.count
    ahead = stages * stride
    for s in range(stages):

        @pl.when(first + s * stride < workers.tiles)
        def _(s=s):
            load(first + s * stride, jnp.int32(s))

    if scheduler is not None:
        scheduler.publish(jnp.int32(-1), scheduler.request())
    begin()

    def advance(k, tile, carry):
        """Works on the k-th tile; returns (the carry, the tile that comes in instead)."""
        slot = lax.rem(k, jnp.int32(stages))
        number = None if scheduler is None else scheduler.request()
        coming = lambda: tile + ahead if scheduler is None else scheduler.number(k - 1) + ahead

        def free():
            if workers.interpret is None:
                warpgroup_barrier()
            if scheduler is not None:
                scheduler.publish(k, number)
            following = coming()

            @pl.when(following < workers.tiles)
            def _():
                load(following, slot)

        carry = work(tile, slot, lax.rem(k, jnp.int32(2)), free, carry)
        return carry, coming()

    if scheduler is None:
        body = lambda k, carry: advance(k, first + k * stride, carry)[0]
        return lax.fori_loop(0, workers.steps(workers.tiles), body, carry)

    def step(state):
        k, queue, carry = state
        carry, following = advance(k, queue[0], carry)
        return k + 1, (*queue[1:], following), carry

    queue = tuple(first + s * stride for s in range(stages))
    return lax.while_loop(lambda state: state[1][0] < workers.tiles, step, (jnp.int32(0), queue, carry))[2]


def call(body, inputs, out_type, scratch: NamedTuple, workers: Workers):
    """Launches the kernel body(scheduler, scratch refs, *input refs, *output refs); the scheduler is for `run`.

    scratch: types of shared memory and barriers; the body gets the refs in the same NamedTuple.
    """
    options = {} if workers.interpret is None else {"interpret": workers.interpret}
    if workers.warpgroups > 1:
        options |= {"num_threads": workers.warpgroups, "thread_name": WARPGROUP}

    def launch(body, inputs, scratch_types):
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            grid=(workers.ctas,),
            grid_names=(CTA,),
            compiler_params=compat.compiler_params(),
            **options,
        )(*inputs)

    def with_scratch(scheduler, refs):
        n = len(refs) - len(scratch)
        body(scheduler, type(scratch)(*refs[n:]), *refs[:n])

    # The kernel has the body's name in profiles.
    @functools.wraps(body)
    def static(*refs):
        with_scratch(None, refs)

    @functools.wraps(body)
    def dynamic(*refs):
        counter_g, numbers_s = refs[len(inputs)], refs[-1]
        scheduler = TileScheduler(counter_g, numbers_s.at[workers.warpgroup()])
        with_scratch(scheduler, [*refs[: len(inputs)], *refs[len(inputs) + 1 : -1]])

    # A batch of calls is one after the other: each has its own counter.
    @jax.custom_batching.sequential_vmap
    def with_counter(*inputs):
        counter = jax.new_ref(jnp.zeros((1,), jnp.int32))
        return launch(dynamic, [*inputs, counter], [*scratch, TileScheduler.scratch(workers.warpgroups)])

    out = with_counter(*inputs) if workers.dynamic else launch(static, inputs, list(scratch))
    # Else XLA may let the kernel write into its caller's update of a larger array, at any byte of it.
    return lax.optimization_barrier(out)


def warpgroup_barrier() -> None:
    """Makes all threads of a warpgroup wait for each other."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        mgpu.utils.warpgroup_barrier()

    wait()


def _is_leader() -> ir.Value:
    return mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)
