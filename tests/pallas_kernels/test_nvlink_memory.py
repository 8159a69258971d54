"""The shared memory of NVLink kernels, and that nobody in it waits for who waits for him."""

import jax.numpy as jnp
import pytest

from pallas_kernels.formats import Geometry
from pallas_kernels.mosaic.tiling import Tiling
from pallas_kernels.nvlink import collective, programs
from pallas_kernels.nvlink.post import Slots
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format, without_format

PROGRAMS = (programs.TWO_SHOT, programs.ONE_SHOT, programs.REDUCE_SCATTER, programs.ALL_GATHER)
NAMES = [name for name, codec in CODECS.items() if not (codec.exact or without_format(codec))]


@pytest.mark.parametrize("count", sorted({n for m in programs.MEMORIES for n in (m.outgoing, m.sums)}))
def test_a_worker_and_its_courier_go_on(count):
    """A worker fills a slot that is free; the courier frees the one of `lag` frames ago when it has sent another."""
    lag = Slots(None, None, None, count).lag
    filled = sent = freed = 0
    for _ in range(100):
        before = filled, sent
        if filled < count or filled - count < freed:
            filled += 1
        if sent < filled:
            sent += 1
            freed = max(freed, sent - lag)
        assert (filled, sent) != before
    assert sent >= 90


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_preset_fits(program, ranks):
    for name in NAMES:
        fmt = to_format(CODECS[name])
        tiling = Tiling(fmt, Geometry(64 * 128, 1, 64 * 128), any_order=True)
        for dtype in ("bfloat16", "float16", "float32"):
            memory = programs.memory_of(program, tiling, ranks, jnp.dtype(dtype))
            assert memory is not None, (name, dtype)
            # Barriers come in arrays of 32 at most.
            combiners = program.combiners(memory.workers)
            assert combiners * memory.sets * (ranks - program.owned) <= 32, (name, dtype)
            workers = 1 + combiners + program.receivers(memory.workers)
            registers = workers * collective.WORKERS_REGISTERS[workers] + collective.COURIERS_REGISTERS
            # Of 65,536, by 128 threads, in eights; a launch gives every warpgroup the same.
            assert registers <= (workers + 1) * (512 // (workers + 1) // 8 * 8)
