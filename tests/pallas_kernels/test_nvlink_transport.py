"""NVLink kernels move frames between the right ranks, rows and slots, on a model of the GPUs (`nvlink_model.py`).

The kernels' whole bodies run: tile schedule, orders, copy warps, roles and how they are put together. Sums, and what is
rounded on the way, are judged by numpy.
"""

import gc

import numpy as np
import pytest
from covers import cover
from nvlink_model import ROTATION, NVLinkModel, split

from pallas_kernels.formats import Geometry
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling
from pallas_kernels.nvlink import collective, shared_memory, tile_schedule
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format

FMT, ROW = to_format(CODECS["taco"]), 128
KINDS = {
    "two_shot": shared_memory.TWO_SHOT,
    "one_shot": shared_memory.ONE_SHOT,
    "reduce_scatter": shared_memory.REDUCE_SCATTER,
    "all_gather": shared_memory.ALL_GATHER,
}
CTAS, MIN_SIGNALS = 2, 2
# {rows of a message: steps per signal}. One tile for one CTA; CTAs with 3 and 2 tiles, the last moved back; with 6 and
# 5, of which 5 are no whole signals.
ROWS = {TILE_ROWS: 1, 4 * TILE_ROWS + 24: 1, 10 * TILE_ROWS + 8: 3}
CASES = cover(
    2, kind=tuple(KINDS), ranks=(2, 4, 8), rows=tuple(ROWS), timing=("early", "late", "random"),
    buffers=range(len(shared_memory.BUFFER_COUNTS)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """Thousands of operations are kept, and for each few of them the collector would look at all of jax's objects."""
    gc.disable()
    yield
    gc.enable()


def sent(x):
    """Returns values as they come out of a frame."""
    codes, scales = split(x * ROTATION)
    return codes * scales / ROTATION


def expected(kind, x):
    """Returns (y, the largest rotated value that is encoded) of each rank.

    x [ranks, messages, rows]: one message, or one for each rank, its owner.
    """
    ranks, messages, rows = x.shape
    if kind == "all_gather":
        return np.stack([sent(x).reshape(-1)] * ranks), ROTATION * np.abs(x).max((1, 2))
    owned = messages == ranks
    total = []
    for m in range(messages):
        terms = [x[r, m] if owned and r == m else sent(x[r, m]) for r in range(ranks)]
        total.append(sum(terms[1:], terms[0]))  # float32, in rank order
    total = np.stack(total)
    others = np.abs(x).max(2)
    if owned:
        others[np.arange(ranks), np.arange(ranks)] = 0
    largest = others.max(1)
    if kind == "one_shot":
        return np.stack([total[0]] * ranks), ROTATION * largest
    if kind == "reduce_scatter":
        return total, ROTATION * largest
    return np.stack([sent(total).reshape(-1)] * ranks), ROTATION * np.maximum(largest, np.abs(total).max(1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_frame_comes_to_its_place(case, monkeypatch):
    kind, ranks, rows, timing, buffers = case
    roles = KINDS[kind]
    messages = ranks if roles.to_owners else 1
    tiling = Tiling(FMT, Geometry(messages * rows * ROW, messages, rows * ROW), any_order=True)
    model = NVLinkModel(ranks, shared_memory.BUFFER_COUNTS[buffers], timing)
    model.install(monkeypatch, ctas=CTAS, min_signals=MIN_SIGNALS)
    schedule = tile_schedule.TileSchedule(tiling, ranks, "tp")
    assert schedule.steps_per_signal == ROWS[rows]

    x = np.random.default_rng(rows).standard_normal((ranks, messages, rows), np.float32)
    parts = {"two_shot": ranks, "all_gather": ranks}.get(kind, 1)  # whose rows y has
    y, largest = collective.run(roles, schedule, x.reshape(ranks, -1), exponent=None, out_rows=parts * rows)
    y_expected, largest_expected = expected(kind, x)
    np.testing.assert_array_equal(y, y_expected)
    written = largest[:, :, 0]
    np.testing.assert_array_equal(written.max(1), largest_expected)

    # Every row once; twice where the last tile repeats rows of the one before.
    tiles = -(-rows // TILE_ROWS)
    times = np.ones(rows, int)
    times[rows - TILE_ROWS : (tiles - 1) * TILE_ROWS] = 2
    for rank in range(ranks):
        np.testing.assert_array_equal(model.y_writes[rank], np.tile(times, parts))
    # Every rank's frame of every tile once; where messages have owners, their own term comes from no frame.
    for inbox, frames in enumerate(model.inbox_writes):
        for rank in range(ranks):
            once = np.ones((ranks, tiles), int)
            once[rank] = not (roles.to_owners and inbox == 0)
            np.testing.assert_array_equal(frames[rank], once)
    # As many signals as the last wait asks for: else a wait never ends, or one does before the frames are there.
    for of_inbox in model.signals:
        for counters in of_inbox:
            assert [c.count for c in counters.flat] == [c.asked for c in counters.flat]
