"""Which roles a collective's kernel has, and how it shares its memory out among them.

| program | warpgroup 0 | warpgroup 1 | warpgroup 2 |
|---|---|---|---|
| two-shot all-reduce | send to owners | combine, to frames | receive |
| one-shot all-reduce | send to all | combine all, to values | the same, every other tile |
| reduce-scatter | send to owners | combine, to values | the same, every other tile |
| all-gather | send to all | receive | the same, every other tile |

Where shared memory is short the third one goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS as ROWS
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink.frames import Frames

# Of shared memory a kernel can have so much; Mosaic puts arrays at multiples, and has scratch of its own.
MOST_BYTES, ALIGNMENT, MOSAIC_BYTES = 232448, 1024, 2048


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
    Memory(2, 2, 6, 2, own_stages=2, sums=4, slots=4, buffers=2),
    Memory(2, 2, 6, 2, own_stages=1, sums=4, slots=3, buffers=1),
    Memory(2, 2, 5, 1, own_stages=1, sums=3, slots=3, buffers=1),
    Memory(2, 2, 3, 2, own_stages=1, sums=2, slots=3, buffers=1),
    Memory(2, 2, 3, 1, own_stages=1, sums=2, slots=2, buffers=1),
    Memory(2, 1, 3, 1, own_stages=1, sums=2, slots=2, buffers=1),
    Memory(1, 2, 3, 1, own_stages=1, sums=2, slots=2, buffers=1),
    Memory(1, 1, 2, 1, own_stages=1, sums=1, slots=1, buffers=1),
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
