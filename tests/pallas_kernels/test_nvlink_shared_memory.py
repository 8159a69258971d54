"""The shared memory of NVLink kernels, and that a warpgroup and its copy warp never wait for each other."""

import jax.numpy as jnp
import pytest

from pallas_kernels.formats import Geometry
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink import collective, shared_memory
from pallas_kernels.nvlink.frame_transport import FrameSlots
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format, without_format

COLLECTIVES = (
    shared_memory.TWO_SHOT, shared_memory.ONE_SHOT, shared_memory.REDUCE_SCATTER, shared_memory.ALL_GATHER,
)  # fmt: skip
NAMES = [name for name, codec in CODECS.items() if not (codec.exact or without_format(codec))]


@pytest.mark.parametrize(
    "count", sorted({n for c in shared_memory.BUFFER_COUNTS for n in (c.outgoing, c.outgoing_sums)})
)
def test_a_warpgroup_and_its_copy_warp_go_on(count):
    """A warpgroup fills a slot that is empty; the copy warp empties that of `lag` frames ago when it sends another."""
    lag = FrameSlots(None, None, None, count).lag
    filled = sent = emptied = 0
    for _ in range(100):
        before = filled, sent
        if filled < count or filled - count < emptied:
            filled += 1
        if sent < filled:
            sent += 1
            emptied = max(emptied, sent - lag)
        assert (filled, sent) != before
    assert sent >= 90


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("roles", COLLECTIVES, ids=lambda roles: roles.kernel_name)
def test_every_preset_fits(roles, ranks):
    for name in NAMES:
        fmt = to_format(CODECS[name])
        tiling = Tiling(fmt, Geometry(64 * 128, 1, 64 * 128), any_order=True)
        for dtype in ("bfloat16", "float16", "float32"):
            counts = shared_memory.fit_buffers(roles, tiling, ranks, jnp.dtype(dtype))
            assert counts is not None, (name, dtype)
            # Barriers come in arrays of 32 at most.
            combiners = roles.combiners(counts.writers)
            assert combiners * counts.incoming_sets * (ranks - roles.has_own_term) <= 32, (name, dtype)
            warpgroups = 1 + combiners + roles.receivers(counts.writers)
            registers = warpgroups * collective.COMPUTE_REGISTERS[warpgroups] + collective.COPY_WARP_REGISTERS
            # Of 65,536, by 128 threads, in eights; a launch gives every warpgroup the same.
            assert registers <= (warpgroups + 1) * (512 // (warpgroups + 1) // 8 * 8)
