"""Schedules as numbers: every piece of work is done once, after what it needs has arrived, and the bubble is what
remains."""

import pytest

from taco_jax.pipeline import Schedule

SIZES = [(2, 1, 1), (2, 8, 1), (4, 1, 1), (4, 3, 1), (8, 8, 1), (2, 8, 2), (4, 2, 3), (4, 6, 2), (4, 8, 2), (3, 7, 4)]


@pytest.mark.parametrize("stages, microbatches, chunks", SIZES)
def test_every_item_is_done_once_and_in_time(stages, microbatches, chunks):
    schedule = Schedule("circular" if chunks > 1 else "gpipe", stages, microbatches, chunks)
    done, busy = {}, 0  # (microbatch, chunk, stage) -> tick
    for tick in range(schedule.forward_ticks):
        for stage in range(stages):
            microbatch, chunk, live = schedule.work(tick - stage)
            if live:
                assert 0 <= chunk < chunks and (microbatch, chunk, stage) not in done
                done[microbatch, chunk, stage] = tick
                busy += 1
    assert len(done) == microbatches * chunks * stages
    for (microbatch, chunk, stage), tick in done.items():
        assert schedule.item(microbatch, chunk) + stage == tick
        if stage or chunk:
            # What it needs was made in the tick before: nothing waits in a buffer, and nothing comes too late.
            before = (microbatch, chunk, stage - 1) if stage else (microbatch, chunk - 1, stages - 1)
            assert done[before] == tick - 1
    assert max(done.values()) == schedule.forward_ticks - 1
    assert schedule.bubble == pytest.approx(1 - busy / (stages * schedule.forward_ticks))


def test_the_bubble_is_that_of_the_papers():
    for stages, m in ((2, 8), (4, 4), (4, 32), (8, 1)):
        assert Schedule("gpipe", stages, m).bubble == pytest.approx((stages - 1) / (m + stages - 1))
        assert Schedule("1f1b", stages, m).bubble == Schedule("gpipe", stages, m).bubble
    assert Schedule("circular", 4, 8, 2).bubble == pytest.approx(3 / (2 * 8 + 3))
    # A group that is not full costs its empty places.
    assert Schedule("circular", 4, 9, 2).bubble > Schedule("circular", 4, 12, 2).bubble


@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 9), (4, 3), (4, 32)])
def test_1f1b_keeps_few_microbatches(stages, microbatches):
    schedule = Schedule("1f1b", stages, microbatches)
    for stage in range(stages):
        kept = set()
        for tick in range(schedule.ticks):
            forward, backward = tick - stage, tick - 2 * (stages - 1) + stage
            if 0 <= forward < microbatches:
                # The place in the ring is free.
                assert forward % schedule.in_flight not in {m % schedule.in_flight for m in kept}
                kept.add(forward)
            if 0 <= backward < microbatches:
                kept.remove(backward)
        assert not kept
    assert schedule.in_flight <= 2 * stages
