"""One kernel for a whole collective: its roles, their shared memory, and the buffers that other ranks write into.

| program | warpgroup 0 | warpgroup 1 | warpgroup 2 |
|---|---|---|---|
| two-shot all-reduce | send to owners | combine, to frames | receive |
| one-shot all-reduce | send to all | combine all, to values | the same, every other tile |
| reduce-scatter | send to owners | combine, to values | the same, every other tile |
| all-gather | send to all | receive | the same, every other tile |

XLA gives every call buffers of its own, zeroes its semaphores, and lets no rank begin before all have come that far.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import ROWS, Tiling
from pallas_kernels.mosaic.writer import WARPS, put_largest
from pallas_kernels.nvlink import post, roles
from pallas_kernels.nvlink.deal import CTA, ROLE, Deal
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.nvlink.post import Slots

# Of shared memory a kernel can have so much; Mosaic puts arrays at multiples, and has scratch of its own.
MOST_BYTES, ALIGNMENT, MOSAIC_BYTES = 232448, 1024, 2048
# A multiprocessor has 512 for each of 128 lanes: what so many workers can use, when the couriers give up theirs.
WORKERS_REGISTERS, COURIERS_REGISTERS = {2: 240, 3: 160}, 24


@dataclass(frozen=True)
class Program:
    """Which roles there are. scatters: every message has an owner, who alone gets its frames."""

    name: str
    scatters: bool
    combines: bool
    receives: bool

    @property
    def sums_into_frames(self) -> bool:
        return self.combines and self.receives

    @property
    def owned(self) -> bool:
        """Whether sums have a term that comes from no frame: the owner's x."""
        return self.scatters

    def combiners(self, workers: int) -> int:
        """Warpgroups that combine; `workers` share what writes values, where the program is no two-shot."""
        return 0 if not self.combines else 1 if self.receives else workers

    def receivers(self, workers: int) -> int:
        return 0 if not self.receives else 1 if self.combines else workers

    def into_values(self, workers: int) -> int:
        """Warpgroups that write values."""
        return self.combiners(workers) + self.receivers(workers) - self.sums_into_frames


TWO_SHOT = Program("nvlink_all_reduce", True, True, True)
ONE_SHOT = Program("nvlink_all_reduce_one_shot", False, True, False)
REDUCE_SCATTER = Program("nvlink_reduce_scatter", True, True, False)
ALL_GATHER = Program("nvlink_all_gather", False, False, True)


@dataclass(frozen=True)
class Memory:
    """How many warpgroups do the last role, and how much each role reads ahead and lets wait: stages of x, frames going
    out, sets of frames coming in, stages of the own x, frames of sums, slots of single frames, buffers of y."""

    workers: int
    stages: int
    outgoing: int
    sets: int
    own_stages: int
    sums: int
    slots: int
    buffers: int

    def bytes(self, program: Program, ranks: int, matrices: int, frame: int, tile: int) -> int:
        """Of shared memory. matrices: bytes of the rotation's; frame, tile: of one, and of one of x or y."""
        combiners, receivers = program.combiners(self.workers), program.receivers(self.workers)
        own = combiners * self.own_stages if program.owned else 0
        frames = [self.outgoing, combiners * self.sets * (ranks - program.owned), receivers * self.slots]
        frames.append(self.sums if program.sums_into_frames else 0)
        tiles = [self.stages, own, program.into_values(self.workers) * self.buffers]
        arrays = [matrices, *[n * frame for n in frames], *[n * tile for n in tiles]]
        barriers = 1 + self.stages + own + 2 * sum(frames)
        return sum(-(-n // ALIGNMENT) * ALIGNMENT for n in arrays) + 8 * barriers + MOSAIC_BYTES


# The first that fits is taken.
MEMORIES = (
    Memory(2, 2, 6, 2, 2, 4, 4, 2),
    Memory(2, 2, 6, 2, 1, 4, 3, 1),
    Memory(2, 2, 5, 1, 1, 3, 3, 1),
    Memory(2, 2, 3, 2, 1, 2, 3, 1),
    Memory(2, 2, 3, 1, 1, 2, 2, 1),
    Memory(2, 1, 3, 1, 1, 2, 2, 1),
    Memory(1, 2, 3, 1, 1, 2, 2, 1),
    Memory(1, 1, 2, 1, 1, 1, 1, 1),
)


def matrices_dtype(program: Program, dtype) -> jnp.dtype:
    """Of the rotation's matrices. Sums are rotated back in parts of bfloat16."""
    rotates_sums = program.combines and not program.receives
    return jnp.dtype(jnp.bfloat16) if rotates_sums else rotation.operand_dtype(dtype)


def memory_of(program: Program, tiling: Tiling, ranks: int, dtype) -> Memory | None:
    """How a kernel uses its shared memory, None where it does not suffice."""
    tile = ROWS * tiling.row * jnp.dtype(dtype).itemsize
    matrices, frame = Rotator(tiling, matrices_dtype(program, dtype)).bytes, Frames(tiling).bytes
    return next((m for m in MEMORIES if m.bytes(program, ranks, matrices, frame, tile) <= MOST_BYTES), None)


def run(program: Program, deal: Deal, x_RC: jax.Array, exponent, out_rows: int) -> tuple[jax.Array, jax.Array]:
    """Rows of x -> (rows of y [out_rows, row], largest |z| as bits int32[*, 4]). exponent: int32[1] or None."""
    tiling, dtype = deal.tiling, x_RC.dtype
    frames, rotator = Frames(tiling), Rotator(tiling, matrices_dtype(program, dtype))
    memory = memory_of(program, tiling, deal.ranks, dtype)
    if memory is None:
        what = f"{tiling.fmt} of {dtype} over {deal.ranks} ranks"
        raise ValueError(f"{program.name}: {what} needs more shared memory than there is")
    has_exponent = exponent is not None
    exponent = exponent if has_exponent else jnp.zeros((1,), jnp.int32)
    transforms = rotation.transforms(dtype, tiling.chunk)
    n_buffers = 1 + program.sums_into_frames
    combiners, receivers = program.combiners(memory.workers), program.receivers(memory.workers)
    combinings = [roles.Combining(deal, program.owned, i, combiners, memory.sets) for i in range(combiners)]
    receivings = [roles.Receiving(deal, i, receivers, memory.slots) for i in range(receivers)]
    sending = roles.Sending(deal, program.scatters)

    def tiles_memory(*slots):
        return plgpu.SMEM((*slots, ROWS, tiling.row), dtype, transforms=transforms)

    scratch = {"matrices": rotator.scratch, "matrices_full": plgpu.Barrier()}
    scratch |= {"x": tiles_memory(memory.stages), "x_full": plgpu.Barrier(num_barriers=memory.stages)}
    if program.owned:
        scratch["own"] = tiles_memory(combiners, memory.own_stages)
        scratch["own_full"] = plgpu.Barrier(num_barriers=combiners * memory.own_stages)
    scratch["y"] = tiles_memory(program.into_values(memory.workers), memory.buffers)
    counts = {"outgoing": (1, memory.outgoing), "sums": (int(program.sums_into_frames), memory.sums)}
    counts["sets"] = combiners, memory.sets * (deal.ranks - program.owned)
    counts["slots"] = receivers, memory.slots
    for name, (owners, count) in counts.items():
        if owners:
            scratch[name] = frames.scratch(owners, count)
            scratch |= {f"{name}_{state}": plgpu.Barrier(num_barriers=owners * count) for state in ("full", "free")}
    scratch |= {f"signals{k}": plgpu.SemaphoreType.REGULAR((deal.ranks,)) for k in range(n_buffers)}

    def body(x_g, m_g, e_g, y_g, largest_g, *refs):
        buffers_g, s = refs[:n_buffers], dict(zip(scratch, refs[n_buffers:]))
        signals = [s[f"signals{k}"] for k in range(n_buffers)]
        role = lax.axis_index(ROLE)
        rotator.load(m_g, s["matrices"], s["matrices_full"], role)
        begin = lambda: rotator.wait(s["matrices_full"])
        exponent = lambda: e_g[0] if has_exponent else None
        desk = lambda: roles.Desk(deal, frames, rotator, s["matrices"], exponent())

        def slots(name, owner=0):
            count = counts[name][1]
            return Slots(s[name].at[owner], s[f"{name}_full"], s[f"{name}_free"], count, owner * count)

        def note(largest, row):
            put_largest(largest_g.at[lax.axis_index(CTA) * n_buffers + row], largest, False)

        def send():
            tiles = roles.Tiles(desk(), x_g, s["x"], s["x_full"], memory.stages)
            note(roles.send(desk(), sending, tiles, slots("outgoing"), begin), 0)

        def values(index):
            return roles.Values(desk(), y_g, s["y"].at[index], memory.buffers, transforms)

        def combine(i):
            own, stages = None, memory.own_stages
            if program.owned:
                own = roles.Tiles(desk(), x_g, s["own"].at[i], s["own_full"], stages, i * stages)
            into = program.sums_into_frames
            put = roles.to_frames(desk(), slots("sums")) if into else roles.to_values(desk(), values(i))
            largest = roles.combine(desk(), combinings[i], slots("sets", i), own, begin, put, into)
            if into:
                note(largest, 1)

        def receive(i):
            roles.receive(desk(), receivings[i], slots("slots", i), values(i), begin)

        workers = [send, *[functools.partial(combine, i) for i in range(combiners)]]
        workers += [functools.partial(receive, i) for i in range(receivers)]

        def deliver(name, k, order):
            post.deliver(deal, slots(name), buffers_g[k], signals[k], order)

        def fetch(name, k, i, order):
            post.fetch(deal, slots(name, i), buffers_g[k], signals[k], order.total(), order.place)

        couriers = [functools.partial(deliver, "outgoing", 0, sending)]
        if program.sums_into_frames:
            couriers.append(functools.partial(deliver, "sums", 1, roles.Sending(deal, False)))
        couriers += [functools.partial(fetch, "sets", 0, i, order) for i, order in enumerate(combinings)]
        couriers += [functools.partial(fetch, "slots", -1, i, order) for i, order in enumerate(receivings)]

        for i, work in enumerate(workers):

            @pl.when(role == i)
            def _(work=work):
                plgpu.set_max_registers(WORKERS_REGISTERS[len(workers)], action="increase")
                work()
                plgpu.wait_smem_to_gmem(0)

        @pl.when(role == len(workers))
        def _():
            plgpu.set_max_registers(COURIERS_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(courier):
                for i, work in enumerate(couriers):

                    @pl.when(courier == i)
                    def _(work=work):
                        work()

    body.__name__ = program.name
    y_type = jax.ShapeDtypeStruct((out_rows, tiling.row), dtype)
    largest_type = jax.ShapeDtypeStruct((deal.ctas * n_buffers, WARPS), jnp.int32)
    out = plgpu.kernel(
        body,
        out_type=[y_type, largest_type, *[frames.buffer(deal.ranks, deal.tiles)] * n_buffers],
        scratch_types=list(scratch.values()),
        grid=(deal.ctas,),
        grid_names=(CTA,),
        num_threads=2 + combiners + receivers,
        thread_name=ROLE,
        compiler_params=compat.compiler_params(),
    )(x_RC, rotator.operand, exponent)
    # Else XLA may let the kernel write into its caller's update of a larger array, at any byte of it.
    return tuple(lax.optimization_barrier(out[:2]))
