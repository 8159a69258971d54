"""Which roles a collective's kernel has, and how they share its shared memory.

| collective | warpgroup 0 | warpgroup 1 | warpgroup 2 |
|---|---|---|---|
| two-shot all-reduce | send to owners | combine, to frames | receive |
| one-shot all-reduce | send to all | combine, to values | the same, every other tile |
| reduce-scatter | send to owners | combine, to values | the same, every other tile |
| all-gather | send to all | receive | the same, every other frame |

Where shared memory is short the second warpgroup of a role is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.rotation import Rotator
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling
from pallas_kernels.nvlink.frame_transport import FrameCodec

# Shared memory of one CTA on Hopper. Mosaic aligns arrays, and has scratch of its own.
MAX_SHARED_BYTES, ARRAY_ALIGN_BYTES, MOSAIC_SCRATCH_BYTES, BARRIER_BYTES = 232448, 1024, 2048, 8


@dataclass(frozen=True)
class Roles:
    """The warpgroup roles of one collective.

    to_owners: every message has an owner, who alone gets its frames.
    """

    kernel_name: str
    to_owners: bool
    combines: bool
    receives: bool

    @property
    def sums_into_frames(self) -> bool:
        return self.combines and self.receives

    @property
    def has_own_term(self) -> bool:
        """Returns whether one term of a sum comes from no frame: the owner's x."""
        return self.to_owners

    @property
    def inboxes(self) -> int:
        """Returns how many times frames cross the link."""
        return 1 + self.sums_into_frames

    def combiners(self, writers: int) -> int:
        """Returns how many warpgroups combine. writers: those that write values, where there is no two-shot."""
        return 0 if not self.combines else 1 if self.receives else writers

    def receivers(self, writers: int) -> int:
        """Returns how many warpgroups receive."""
        return 0 if not self.receives else 1 if self.combines else writers

    def value_writers(self, writers: int) -> int:
        """Returns how many warpgroups write values."""
        return self.combiners(writers) + self.receivers(writers) - self.sums_into_frames


TWO_SHOT = Roles("nvlink_all_reduce", to_owners=True, combines=True, receives=True)
ONE_SHOT = Roles("nvlink_all_reduce_one_shot", to_owners=False, combines=True, receives=False)
REDUCE_SCATTER = Roles("nvlink_reduce_scatter", to_owners=True, combines=True, receives=False)
ALL_GATHER = Roles("nvlink_all_gather", to_owners=False, combines=False, receives=True)


@dataclass(frozen=True)
class BufferCounts:
    """How many buffers each role has in shared memory, of its warpgroups each.

    | field | counts |
    |---|---|
    | writers | warpgroups that share the role that writes values |
    | x_stages, own_x_stages | tiles of x that are loaded ahead: by `send`, and by `combine` |
    | outgoing, outgoing_sums | frames that wait to be sent: of x, and of sums |
    | incoming_sets | tiles whose frames of all ranks are fetched ahead, to be combined |
    | incoming | single frames that are fetched ahead, to be received |
    | y_buffers | tiles of y that are on their way to global memory |
    """

    writers: int
    x_stages: int
    outgoing: int
    incoming_sets: int
    own_x_stages: int
    outgoing_sums: int
    incoming: int
    y_buffers: int

    def shared_bytes(self, roles: Roles, ranks: int, *, matrix_bytes: int, frame_bytes: int, tile_bytes: int) -> int:
        """Returns the bytes of shared memory. tile_bytes: of a tile of x or y."""
        combiners, receivers = roles.combiners(self.writers), roles.receivers(self.writers)
        own = combiners * self.own_x_stages if roles.has_own_term else 0
        sources = ranks - roles.has_own_term
        frames = [self.outgoing, combiners * self.incoming_sets * sources, receivers * self.incoming]
        frames.append(self.outgoing_sums if roles.sums_into_frames else 0)
        tiles = [self.x_stages, own, roles.value_writers(self.writers) * self.y_buffers]
        arrays = [matrix_bytes, *[n * frame_bytes for n in frames], *[n * tile_bytes for n in tiles]]
        aligned = sum(-(-n // ARRAY_ALIGN_BYTES) * ARRAY_ALIGN_BYTES for n in arrays)
        barriers = 1 + self.x_stages + own + 2 * sum(frames)
        return aligned + barriers * BARRIER_BYTES + MOSAIC_SCRATCH_BYTES


def _counts(writers, x_stages, outgoing, *, sets, own_x, sums, incoming, y) -> BufferCounts:
    return BufferCounts(
        writers=writers, x_stages=x_stages, outgoing=outgoing, incoming_sets=sets, own_x_stages=own_x,
        outgoing_sums=sums, incoming=incoming, y_buffers=y,
    )  # fmt: skip


# The first that fits is taken.
BUFFER_COUNTS = (
    _counts(2, 2, 6, sets=2, own_x=2, sums=4, incoming=4, y=2),
    _counts(2, 2, 6, sets=2, own_x=1, sums=4, incoming=3, y=1),
    _counts(2, 2, 5, sets=1, own_x=1, sums=3, incoming=3, y=1),
    _counts(2, 2, 3, sets=2, own_x=1, sums=2, incoming=3, y=1),
    _counts(2, 2, 3, sets=1, own_x=1, sums=2, incoming=2, y=1),
    _counts(2, 1, 3, sets=1, own_x=1, sums=2, incoming=2, y=1),
    _counts(1, 2, 3, sets=1, own_x=1, sums=2, incoming=2, y=1),
    _counts(1, 1, 2, sets=1, own_x=1, sums=1, incoming=1, y=1),
)


def matrix_dtype(roles: Roles, dtype) -> jnp.dtype:
    """Returns the dtype of the rotation's matrices. Sums are rotated back in parts of bfloat16."""
    rotates_sums = roles.combines and not roles.receives
    return jnp.dtype(jnp.bfloat16) if rotates_sums else rotation.operand_dtype(dtype)


def fit_buffers(roles: Roles, tiling: Tiling, ranks: int, dtype) -> BufferCounts | None:
    """Returns the buffers of a kernel, None where shared memory does not suffice."""
    sizes = {
        "matrix_bytes": Rotator(tiling, matrix_dtype(roles, dtype)).bytes,
        "frame_bytes": FrameCodec(tiling).frame_bytes,
        "tile_bytes": TILE_ROWS * tiling.row_elements * jnp.dtype(dtype).itemsize,
    }
    return next((c for c in BUFFER_COUNTS if c.shared_bytes(roles, ranks, **sizes) <= MAX_SHARED_BYTES), None)
