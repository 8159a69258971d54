"""Frame transport: a tile as it crosses NVLink, and the copy warps that send and fetch it.

A frame is a tile's codes, then its block scales, in one piece of memory and so one copy. Only these kernels read it, so
the bytes of a row may lie in any order (`Tiling.any_order`). Codes and scales themselves are the wire's. A frame of
`taco` is 64 rows of 128 codes and 64 scale bytes, padded to 8,320 bytes.

Warpgroups fill and read slots of shared memory. Copy warps move frames between slots and peers:

    send_frames:   wait full -> copy to peers -> (lag frames later) arrive empty -> signal peers, one for a few steps
    fetch_frames:  wait empty -> wait for the peer's signal -> fence -> copy, whose end completes full

A signal costs a fence of microseconds. Only the copy warp waits for it; warpgroups go on while slots are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.mosaic import kernels, tile_codec
from pallas_kernels.mosaic.registers import thread_blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling
from pallas_kernels.nvlink.tile_schedule import CombineOrder, ReceiveOrder, SendOrder, TileSchedule

# Mosaic makes bulk copies of multiples of so many bytes.
BULK_COPY_ALIGN_BYTES = 128


class FrameCodec:
    """Encodes tiles of one tiling into frames, and decodes them."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling
        self.code_bytes = TILE_ROWS * tiling.row_bytes
        self.plane_bytes = TILE_ROWS * tiling.blocks_per_row
        end = self.code_bytes + tiling.scale_planes * self.plane_bytes
        self.frame_bytes = -(-end // BULK_COPY_ALIGN_BYTES) * BULK_COPY_ALIGN_BYTES

    def scratch(self, *slots: int):
        """Returns the type of shared memory for frames uint8[*slots, frame_bytes]."""
        return plgpu.SMEM((*slots, self.frame_bytes), jnp.uint8)

    def global_type(self, *frames: int) -> jax.ShapeDtypeStruct:
        """Returns the type of global memory for frames uint8[*frames, frame_bytes]."""
        return jax.ShapeDtypeStruct((*frames, self.frame_bytes), jnp.uint8)

    def encode(self, frame_s, z: list, exponent) -> jax.Array:
        """Encodes rotated blocks into a frame; returns the largest |z| of its rows as bits (`kernels.encode_tile`)."""
        t = self.tiling
        largest, planes = kernels.encode_tile(t, z, exponent, noise=None, codes_s=self._codes(frame_s))
        for k in range(t.scale_planes):
            if t.one_thread_per_block:
                thread_blocks.store_scales(self._plane(frame_s, k), planes[0][k], t.interpret is not None)
                continue
            for b in range(t.blocks_per_row):
                compat.store(self._column(frame_s, k, b), planes[b][k].astype(jnp.uint8), optimized=False)
        return largest

    def codes(self, frame_s, dtype=jnp.float32) -> list[jax.Array]:
        """Returns the codes' values, without their scales (`tile_codec.load_codes`)."""
        return tile_codec.load_codes(self.tiling, self._codes(frame_s), dtype)

    def scales(self, frame_s, exponent) -> list[jax.Array]:
        """Returns the scale of each block of a row, float32[64]; float32[64, 8] with one thread per block."""
        t = self.tiling
        if t.one_thread_per_block:
            planes = [self._plane(frame_s, k).reshape(TILE_ROWS, t.blocks_per_row) for k in range(t.scale_planes)]
            found = [thread_blocks.load_scales(plane, t.interpret is not None) for plane in planes]
            return [tile_codec.read_scales(t.fmt, found, exponent)]
        out = []
        for b in range(t.blocks_per_row):
            found = []
            for k in range(t.scale_planes):
                plane = compat.load(self._column(frame_s, k, b), plgpu.Layout.WGMMA.reduce(1), optimized=False)
                found.append(plane.astype(jnp.int32) & 0xFF)
            out.append(tile_codec.read_scales(t.fmt, found, exponent))
        return out

    def decode(self, frame_s, exponent) -> list[jax.Array]:
        """Returns a frame's values, still rotated: float32[64, chunk] each."""
        return tile_codec.scale_rows(self.tiling, self.codes(frame_s), self.scales(frame_s, exponent))

    def _codes(self, frame_s):
        return frame_s.at[pl.ds(0, self.code_bytes)].reshape(TILE_ROWS, self.tiling.row_bytes)

    def _plane(self, frame_s, k: int):
        return frame_s.at[pl.ds(self.code_bytes + k * self.plane_bytes, self.plane_bytes)]

    def _column(self, frame_s, k: int, b: int):
        """Returns the bytes of block b of every row in scale plane k, uint8[64]."""
        plane_s, per_row = self._plane(frame_s, k), self.tiling.blocks_per_row
        return plane_s.reshape(TILE_ROWS, per_row).at[:, b] if per_row > 1 else plane_s


class SlotScratch(NamedTuple):
    """Slots of `owners` warpgroups: frames uint8[owners, count, frame_bytes], barriers [owners * count]."""

    frames: Any
    full: Any
    empty: Any

    @classmethod
    def types(cls, codec: FrameCodec, owners: int, count: int) -> SlotScratch:
        barriers = plgpu.Barrier(num_barriers=owners * count)
        return cls(codec.scratch(owners, count), full=barriers, empty=barriers)

    def slots(self, owner: int = 0) -> FrameSlots:
        """Returns the slots of one warpgroup."""
        count = self.frames.shape[1]
        return FrameSlots(self.frames.at[owner], self.full, self.empty, count=count, first_barrier=owner * count)


@dataclass(frozen=True)
class FrameSlots:
    """A pipeline of frames in shared memory, uint8[count, frame_bytes], between a warpgroup and a copy warp.

    Slot i has the barriers `full` and `empty` at first_barrier + i. Sending, the warpgroup produces and the copy warp
    consumes; fetching, the other way round.
    """

    frames_s: Any
    full: Any
    empty: Any
    count: int
    first_barrier: Any = 0

    @property
    def lag(self) -> int:
        """Frames that are sent after one before its slot is released and the frame is signalled.

        On a busy link a copy takes that long. A larger lag would deadlock the warpgroup and the copy warp.
        """
        return self.count - 1

    def index(self, i):
        return lax.rem(i, jnp.int32(self.count))

    def wait(self, barriers, slot) -> None:
        plgpu.barrier_wait(barriers.at[self.first_barrier + slot])

    def arrive(self, barriers, slot) -> None:
        plgpu.barrier_arrive(barriers.at[self.first_barrier + slot])

    def producer_acquire(self, i):
        """Returns the slot of frame i once it is empty. Called by a warpgroup."""

        @pl.when(i >= self.count)
        def _():
            self.wait(self.empty, self.index(i))

        return self.frames_s.at[self.index(i)]

    def producer_commit(self, i) -> None:
        """Hands the written frame i to the copy warp; all threads of the warpgroup have passed a barrier then."""
        plgpu.commit_smem()
        self.arrive(self.full, self.index(i))

    def consumer_wait(self, slot):
        """Returns the frame in a slot once it is there. Called by a warpgroup."""
        self.wait(self.full, slot)
        return self.frames_s.at[slot]

    def consumer_release(self, slot) -> None:
        self.arrive(self.empty, slot)


def send_frames(schedule: TileSchedule, slots: FrameSlots, order: SendOrder, *, inbox_g, signals) -> None:
    """Copies the frames of `order` to their ranks and signals those. The work of one copy warp.

    inbox_g [ranks, tiles, frame_bytes]: where frames arrive, on every rank; row r is what rank r sent. signals [ranks]:
    this CTA's semaphores, alike.
    """
    total, targets = order.total(), order.ranks_per_frame
    lag = slots.lag

    def signal_step(i, sent_since: int):
        """Signals the step that frame i ends, `sent_since` frames having been sent after it."""
        step, distance = order.place(i)
        ends_step = (targets > 1) | (distance == order.frames_per_step)

        @pl.when((i >= 0) & ends_step & schedule.signals_after(step))
        def _():
            plgpu.wait_smem_to_gmem(sent_since * targets, wait_read_only=False)
            distances = range(1, max(targets, order.frames_per_step) + 1)
            peers = [schedule.device(schedule.peer(d)) for d in distances]
            signal([plgpu.remote_ref(signals, peer).at[schedule.rank()] for peer in peers])

    def send(i, carry):
        step, distance = order.place(i)
        slot = slots.index(i)
        slots.wait(slots.full, slot)
        for k in range(targets):
            there = plgpu.remote_ref(inbox_g, schedule.device(schedule.peer(distance + k)))
            plgpu.copy_smem_to_gmem(slots.frames_s.at[slot], there.at[schedule.rank(), schedule.tile(step)])
        plgpu.wait_smem_to_gmem(lag * targets, wait_read_only=True)

        @pl.when(i >= lag)
        def _():
            slots.arrive(slots.empty, slots.index(i - lag))

        signal_step(i - lag, lag)
        return carry

    lax.fori_loop(0, total, send, 0)
    for behind in reversed(range(lag)):
        signal_step(total - 1 - behind, behind)


def fetch_frames(
    schedule: TileSchedule, slots: FrameSlots, order: CombineOrder | ReceiveOrder, *, inbox_g, signals
) -> None:
    """Copies the frames of `order` from the inbox into slots, each once its rank has signalled it. The work of one copy
    warp."""

    def fetch(i, carry):
        source, step, slot = order.place(i)

        @pl.when(i >= slots.count)
        def _():
            slots.wait(slots.empty, slot)

        pl.semaphore_wait(signals.at[source], schedule.signals_before(step), decrement=False)
        _fence_proxy_async()
        plgpu.copy_gmem_to_smem(
            inbox_g.at[source, schedule.tile(step)], slots.frames_s.at[slot],
            slots.full.at[slots.first_barrier + slot], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )  # fmt: skip
        return carry

    lax.fori_loop(0, order.total(), fetch, 0)


def _fence_proxy_async() -> None:
    """Orders bulk copies after it behind loads before it: the two take different ways through the memory system."""

    @plgpu.inline_mgpu()
    def fence(ctx):
        mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def signal(semaphores: list) -> None:
    """Adds 1 to each semaphore, with release semantics. One fence serves them all: it takes microseconds."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(semaphores))
    def add(ctx, *semaphores):
        utils = mgpu.utils
        with mgpu.when(utils.single_thread_predicate(utils.ThreadSubset.WARP)):
            utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
            for semaphore in semaphores:
                text = "red.relaxed.sys.global.add.u32 [$0], 1;"
                utils.inline_ptx(text, utils.memref_ptr(semaphore), has_side_effects=True)

    add(*semaphores)
