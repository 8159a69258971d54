"""One kernel for a whole collective: workers and couriers, their memory, and buffers that other ranks write into.

XLA gives every call buffers of its own, zeroes its semaphores, and lets no rank begin before all have come that far.
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
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.wire_io import WARPS_PER_WARPGROUP as WARPS
from pallas_kernels.mosaic.wire_io import put_largest
from pallas_kernels.nvlink import orders, post, roles
from pallas_kernels.nvlink.deal import CTA, ROLE, Deal
from pallas_kernels.nvlink.frames import Frames
from pallas_kernels.nvlink.post import Slots
from pallas_kernels.nvlink.programs import Program, matrices_dtype, memory_of

# A multiprocessor has 512 for each of 128 lanes: what so many workers can use, when the couriers give up theirs.
WORKERS_REGISTERS, COURIERS_REGISTERS = {2: 240, 3: 160}, 24


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
    combinings = [orders.Combining(deal, program.owned, i, combiners, memory.sets) for i in range(combiners)]
    receivings = [orders.Receiving(deal, i, receivers, memory.slots) for i in range(receivers)]
    sending = orders.Sending(deal, program.scatters)

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
                own = roles.Tiles(desk(), x_g, s["own"].at[i], s["own_full"], stages=stages, first=i * stages)
            into = program.sums_into_frames
            put = roles.to_frames(desk(), slots("sums")) if into else roles.to_values(desk(), values(i))
            largest = roles.combine(
                desk(), combinings[i], slots("sets", i), own, begin=begin, put=put, begins_with_term=into
            )
            if into:
                note(largest, 1)

        def receive(i):
            roles.receive(desk(), receivings[i], slots("slots", i), values(i), begin)

        workers = [send, *[functools.partial(combine, i) for i in range(combiners)]]
        workers += [functools.partial(receive, i) for i in range(receivers)]

        def deliver(name, k, order):
            post.deliver(deal, slots(name), buffers_g[k], signals[k], order)

        def fetch(name, k, i, order):
            post.fetch(deal, slots(name, i), buffers_g[k], signals[k], order)

        couriers = [functools.partial(deliver, "outgoing", 0, sending)]
        if program.sums_into_frames:
            couriers.append(functools.partial(deliver, "sums", 1, orders.Sending(deal, False)))
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
