"""One kernel for a whole collective over NVLink.

Warps of a CTA. One CTA runs on each multiprocessor.

| warps | registers of a thread | do |
|---|---|---|
| warpgroups 0, 1 and mostly 2 | 160, or 240 where there are two | a role each (`shared_memory.py`, `warp_roles.py`) |
| the warpgroup after them | 24 | copy warps, one for each array of slots and warpgroup (`frame_transport.py`) |

Shared memory, of at most 227 KB. `BufferCounts` has the counts; a role that a collective lacks has no buffers.

| array | holds | barriers |
|---|---|---|
| matrices | the rotation's | loaded |
| x | [x_stages, 64, row] tiles that `send` encodes | loaded, of each stage |
| own_x | [combiners, own_x_stages, 64, row] the owner's terms | loaded, of each stage |
| y | [value writers, y_buffers, 64, row] tiles on their way out | none: `wait_smem_to_gmem` |
| outgoing | [1, outgoing] frames of x | full, empty, of each slot |
| outgoing_sums | [1, outgoing_sums] frames of sums | full, empty, of each slot |
| incoming_sets | [combiners, incoming_sets * sources] frames to combine | full, empty, of each slot |
| incoming | [receivers, incoming] frames to receive | full, empty, of each slot |

Global memory that peers write into: an inbox [ranks, tiles, frame_bytes] and semaphores [ranks] for each time that
frames cross the link. XLA gives every call inboxes of its own, zeroes its semaphores, and lets no rank begin before all
have come that far.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS
from pallas_kernels.mosaic.wire_io import WARPS_PER_WARPGROUP, put_largest
from pallas_kernels.nvlink import warp_roles
from pallas_kernels.nvlink.frame_transport import FrameCodec, SlotScratch, fetch_frames, send_frames
from pallas_kernels.nvlink.shared_memory import BufferCounts, Roles, fit_buffers, matrix_dtype
from pallas_kernels.nvlink.tile_schedule import (
    CTA_AXIS,
    ROLE_AXIS,
    CombineOrder,
    ReceiveOrder,
    SendOrder,
    TileSchedule,
)

# Registers of a thread. A multiprocessor has 512 for each of 128 lanes: what so many compute warpgroups can use when
# the copy warps give up theirs.
COMPUTE_REGISTERS, COPY_WARP_REGISTERS = {2: 240, 3: 160}, 24


class Scratch(NamedTuple):
    """The table at the head of this file; None where the collective has no such role. signals: one for each inbox."""

    matrices: Any
    matrices_loaded: Any
    x: Any
    x_loaded: Any
    own_x: Any
    own_x_loaded: Any
    y: Any
    outgoing: SlotScratch
    outgoing_sums: SlotScratch | None
    incoming_sets: SlotScratch | None
    incoming: SlotScratch | None
    signals: tuple


def scratch_types(roles: Roles, counts: BufferCounts, ranks: int, *, frames: FrameCodec, rotator: Rotator, dtype):
    """Returns the `Scratch` of types."""
    combiners, receivers = roles.combiners(counts.writers), roles.receivers(counts.writers)
    own_stages = combiners * counts.own_x_stages if roles.has_own_term else 0

    def tiles(*slots):
        tiling = frames.tiling
        transforms = rotation.transforms(dtype, tiling.chunk)
        return plgpu.SMEM((*slots, TILE_ROWS, tiling.row_elements), dtype, transforms=transforms)

    def slots(owners, count):
        return SlotScratch.types(frames, owners, count) if owners else None

    return Scratch(
        matrices=rotator.scratch,
        matrices_loaded=plgpu.Barrier(),
        x=tiles(counts.x_stages),
        x_loaded=plgpu.Barrier(num_barriers=counts.x_stages),
        own_x=tiles(combiners, counts.own_x_stages) if own_stages else None,
        own_x_loaded=plgpu.Barrier(num_barriers=own_stages) if own_stages else None,
        y=tiles(roles.value_writers(counts.writers), counts.y_buffers),
        outgoing=slots(1, counts.outgoing),
        outgoing_sums=slots(int(roles.sums_into_frames), counts.outgoing_sums),
        incoming_sets=slots(combiners, counts.incoming_sets * (ranks - roles.has_own_term)),
        incoming=slots(receivers, counts.incoming),
        signals=(plgpu.SemaphoreType.REGULAR((ranks,)),) * roles.inboxes,
    )


def run(
    roles: Roles, schedule: TileSchedule, x_RC: jax.Array, *, exponent: jax.Array | None, out_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Runs a collective on rows of x; returns (rows of y [out_rows, row], largest |z| as bits int32[*, 4]).

    exponent: int32[1] or None.

        send:     for each tile of x:       z = rotate(x); frame = encode(z); to its owner, or to all
        combine:  for each tile:            total = sum over ranks of decode(frame), the owner's own term rotate(x)
                      two-shot:             frame = encode(total); to all
                      else:                 y = rotate back(total)
        receive:  for each tile and rank:   y = rotate back(decode(frame))
        copy warps, for each array of slots: send full slots and signal, or wait for signals and fill empty ones

    Deadlock-free: waits only go to earlier stages, and every inbox holds a whole message. Requires all CTAs resident,
    so grid <= number of multiprocessors.
    """
    tiling, dtype = schedule.tiling, x_RC.dtype
    frames, rotator = FrameCodec(tiling), Rotator(tiling, matrix_dtype(roles, dtype))
    counts = fit_buffers(roles, tiling, schedule.ranks, dtype)
    if counts is None:
        what = f"{tiling.fmt} of {dtype} over {schedule.ranks} ranks"
        raise ValueError(f"{roles.kernel_name}: {what} needs more shared memory than there is")
    has_exponent = exponent is not None
    exponent = exponent if has_exponent else jnp.zeros((1,), jnp.int32)
    combiners, receivers = roles.combiners(counts.writers), roles.receivers(counts.writers)
    to_peers = SendOrder(schedule, roles.to_owners)
    to_combine = [
        CombineOrder(schedule, roles.has_own_term, first=i, stride=combiners, sets=counts.incoming_sets)
        for i in range(combiners)
    ]
    to_receive = [ReceiveOrder(schedule, i, receivers, counts.incoming) for i in range(receivers)]
    scratch = scratch_types(roles, counts, schedule.ranks, frames=frames, rotator=rotator, dtype=dtype)
    scratch_leaves, scratch_tree = jax.tree.flatten(scratch)

    def body(x_g, matrices_g, exponent_g, y_g, largest_g, *refs):
        inboxes_g, s = refs[: roles.inboxes], scratch_tree.unflatten(refs[roles.inboxes :])
        warpgroup = lax.axis_index(ROLE_AXIS)
        rotator.load(matrices_g, s.matrices, s.matrices_loaded, warpgroup)
        wait_for_matrices = lambda: rotator.wait(s.matrices_loaded)

        def context():
            exponent = exponent_g[0] if has_exponent else None
            return warp_roles.RoleContext(schedule, frames, rotator, matrices_s=s.matrices, exponent=exponent)

        def put_maxima(largest, inbox):
            put_largest(largest_g.at[lax.axis_index(CTA_AXIS) * roles.inboxes + inbox], largest, False)

        def output_tiles(role, writer):
            transforms = rotation.transforms(dtype, tiling.chunk)
            return warp_roles.OutputTiles(role, y_g, s.y.at[writer], buffers=counts.y_buffers, transforms=transforms)

        def send():
            role, slots = context(), s.outgoing.slots()
            x = warp_roles.InputTiles(role, x_g, s.x, loaded=s.x_loaded, stages=counts.x_stages)
            put_maxima(warp_roles.send(role, to_peers, x, slots, wait_for_matrices=wait_for_matrices), inbox=0)

        def combine(i):
            role, slots, own_x = context(), s.incoming_sets.slots(i), None
            if roles.has_own_term:
                own_x = warp_roles.InputTiles(
                    role, x_g, s.own_x.at[i], loaded=s.own_x_loaded, stages=counts.own_x_stages,
                    first_barrier=i * counts.own_x_stages,
                )  # fmt: skip
            sum_tiles = functools.partial(
                warp_roles.combine, role, to_combine[i], slots, own_x, wait_for_matrices=wait_for_matrices
            )
            if roles.sums_into_frames:
                store = warp_roles.store_in_frames(role, s.outgoing_sums.slots())
                put_maxima(sum_tiles(store=store, starts_with_term=True), inbox=1)
            else:
                sum_tiles(store=warp_roles.store_in_values(role, output_tiles(role, i)), starts_with_term=False)

        def receive(i):
            role, slots = context(), s.incoming.slots(i)
            y = output_tiles(role, i)
            warp_roles.receive(role, to_receive[i], slots, y, wait_for_matrices=wait_for_matrices)

        compute_warpgroups = [send]
        compute_warpgroups += [functools.partial(combine, i) for i in range(combiners)]
        compute_warpgroups += [functools.partial(receive, i) for i in range(receivers)]

        def copy_warp(move, slots, order, inbox):
            where = {"inbox_g": inboxes_g[inbox], "signals": s.signals[inbox]}
            return functools.partial(move, schedule, slots, order, **where)

        copy_warps = [copy_warp(send_frames, s.outgoing.slots(), to_peers, inbox=0)]
        if roles.sums_into_frames:
            to_all = SendOrder(schedule, to_owners=False)
            copy_warps.append(copy_warp(send_frames, s.outgoing_sums.slots(), to_all, inbox=1))
        for i, order in enumerate(to_combine):
            copy_warps.append(copy_warp(fetch_frames, s.incoming_sets.slots(i), order, inbox=0))
        for i, order in enumerate(to_receive):
            copy_warps.append(copy_warp(fetch_frames, s.incoming.slots(i), order, inbox=-1))

        for i, work in enumerate(compute_warpgroups):

            @pl.when(warpgroup == i)
            def _(work=work):
                plgpu.set_max_registers(COMPUTE_REGISTERS[len(compute_warpgroups)], action="increase")
                work()
                plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == len(compute_warpgroups))
        def _():
            plgpu.set_max_registers(COPY_WARP_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp):
                for i, work in enumerate(copy_warps):
                    pl.when(warp == i)(work)

    body.__name__ = roles.kernel_name
    y_type = jax.ShapeDtypeStruct((out_rows, tiling.row_elements), dtype)
    largest_type = jax.ShapeDtypeStruct((schedule.ctas * roles.inboxes, WARPS_PER_WARPGROUP), jnp.int32)
    inbox_type = frames.global_type(schedule.ranks, schedule.message_tiles)
    out = plgpu.kernel(
        body,
        out_type=[y_type, largest_type, *[inbox_type] * roles.inboxes],
        scratch_types=scratch_leaves,
        grid=(schedule.ctas,),
        grid_names=(CTA_AXIS,),
        num_threads=1 + combiners + receivers + 1,
        thread_name=ROLE_AXIS,
        compiler_params=compat.compiler_params(),
    )(x_RC, rotator.operand, exponent)
    # Else XLA may let the kernel write into its caller's update of a larger array, at any byte of it.
    return tuple(lax.optimization_barrier(out[:2]))
