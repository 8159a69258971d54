"""The guard's decisions by themselves: bounds, patience, ladders, ways back, and when it measures."""

import json
import math
import re

import jax
import numpy as np
import pytest
from reference_codec import Reference, snr_db

from taco_jax.codec import CODECS, STATS, as_codec, tah
from taco_jax.config import CompressionConfig, ConfigError
from taco_jax.train.guard import (
    CLIPPED,
    FIRST,
    FLUSHED,
    FORMER_EVERY,
    NOMINAL_DB,
    SHARE,
    WARM_STEPS,
    Budget,
    Guard,
    ladder,
    text_of,
)
from taco_jax.train.site_stats import summarise_stats

WAY, OTHER = "layers/mlp/down/forward", "head/backward"


def guard(mode="act", *, bounds=None, state=None, codecs=None, patience=3, margin_db=3.0):
    codecs = {WAY: "int4h", OTHER: "int8h"} if codecs is None else codecs
    return Guard(mode, codecs, bounds or {}, margin_db=margin_db, patience=patience, state=state)


def measured(snr_db, flushed=0.16, clipped=0.0, way=WAY):
    return {way: {"snr_db": snr_db, "clipped": clipped, "flushed": flushed}}


def feed(guard, *values, former=False, **more):
    """The events of measurements of these SNR, one after the other."""
    take = guard.observe_former if former else guard.observe
    return [take(measured(value, **more)) for value in values]


def started(mode="act", **options):
    """A guard that has seen its first measurements: bound 15."""
    made = guard(mode, **options)
    assert feed(made, 18, 18.5, 17.5) == [[]] * FIRST
    return made


def test_nothing_is_decided_before_the_first_measurements_are_there():
    made = guard()
    assert made.bound(WAY) is None
    assert feed(made, 18, 3) == [[], []] and made.bound(WAY) is None
    feed(made, 17)
    assert made.bound(WAY) == 14  # their median less the margin, whatever one of them was
    assert made.bound(OTHER) is None


def test_a_way_moves_when_it_has_failed_several_times_in_a_row():
    made = started()
    assert feed(made, 14.9, 14.9, 15.1, 14.9, 14.9) == [[]] * 5
    ((event,),) = feed(made, 14)
    assert (event.kind, event.way, event.before, event.after, event.why) == ("raise", WAY, "int4h", "int5h", "snr")
    assert (event.measured.snr_db, event.bound_db) == (14, 15)
    assert made.moved == {WAY: "int5h"} and made.former == {}
    # The bound is of the signal, not of the codec.
    assert made.bound(WAY) == 15 and feed(made, 14, 20, 14, 14) == [[]] * 4
    assert feed(made, 14)[0][0].after == "int6h"
    assert made.moved == {WAY: "int6h"} and made.former == {WAY: "int5h"}


def test_a_way_moves_as_far_as_it_must():
    for snr, codec in ((11, "int5h"), (8, "int6h"), (-5, "int8h"), (-20, "none")):
        made = started(patience=1)
        assert feed(made, snr)[0][0].after == codec, snr
    # Three times as many flushed values as before are too many for one bit more, though the SNR would be enough.
    made = started(patience=1)
    assert made.observe(measured(14, flushed=0.65))[0].after == "int6h"


def test_the_bound_of_the_plan_counts_from_the_first_measurement():
    made = guard(bounds={WAY: 17.0})
    (*before, (event,)) = feed(made, 16, 16, 16)
    assert before == [[], []] and event.bound_db == 17.0
    assert made.bound(OTHER) is None


@pytest.mark.parametrize("share, more", [("flushed", FLUSHED), ("clipped", CLIPPED)])
def test_shares_count_where_outliers_raise_the_snr(share, more):
    made = guard()
    feed(made, 18, 18, 18, **{share: 0.05})
    assert feed(made, 25, 25, 25, **{share: 0.05 + more - 1e-6}) == [[]] * 3
    ((event,),) = feed(made, 25, 25, 25, **{share: 0.05 + more + 1e-6})[2:]
    assert event.why == share and event.after == "int5h"
    assert re.search(rf"^layers/mlp/down forward int4h -> int5h \(\d+\.\d% {share}, SNR 25.0 dB", event.words(3))


def test_what_is_not_finite_has_no_vote():
    made = started()
    assert feed(made, 1, float("nan"), 1, float("inf"), *[float("nan")] * 4) == [[]] * 8
    assert len(feed(made, 1)[0]) == 1  # the third number below the bound
    assert made.observe({}) == []  # and so has what sent nothing in a codec


def test_a_step_that_is_not_finite_has_no_snr_and_warns_of_nothing(recwarn):
    row = [4.0 if name == "count" else np.inf for name in STATS]
    found = summarise_stats({"head": np.array([row, row])})
    assert math.isnan(found["head/forward"]["snr_db"]) and math.isnan(found["head/backward"]["snr_db"])
    assert not recwarn.list


def test_it_goes_back_when_the_codec_before_is_good_again():
    made = started()
    feed(made, 14, 14, 14)
    # Half of the margin more than the bound, several times in a row.
    assert feed(made, 16.4, 17, 17, 16.4, 17, 17, former=True) == [[]] * 6
    ((event,),) = feed(made, 17, former=True)
    assert (event.kind, event.before, event.after, event.measured.snr_db) == ("back", "int5h", "int4h", 17)
    assert made.moved == {} and made.former == {}
    assert "int5h -> int4h again (int4h has SNR 17.0 dB, bound 15.0)" in event.words(3)


def test_flushed_values_keep_a_way_from_going_back():
    made = started()
    feed(made, 14, 14, 14)
    assert feed(made, *[30] * 9, former=True, flushed=0.16 + FLUSHED / 2 + 1e-6) == [[]] * 9
    assert len(feed(made, *[30] * 3, former=True, flushed=0.16 + FLUSHED / 2 - 1e-6)[2]) == 1


def test_each_return_makes_the_next_one_take_twice_as_long():
    made, took = started(), []
    for _ in range(4):
        feed(made, 14, 14, 14)
        took.append(1)
        while not feed(made, 18, former=True)[0]:
            took[-1] += 1
    assert took == [3, 6, 12, 24]


def test_it_goes_back_by_the_way_that_it_came():
    made = started(patience=1)
    feed(made, 14, 14)
    assert made.former == {WAY: "int5h"}
    feed(made, 18, former=True)
    assert made.moved == {WAY: "int5h"} and made.former == {}


def test_a_warning_is_said_once_until_all_is_well_again():
    made = started("warn")
    (*before, (event,)) = feed(made, 14, 14, 14)
    assert before == [[], []] and event.kind == "warn" and made.moved == {}
    assert event.words(3) == (
        "layers/mlp/down forward stays in int4h (SNR 14.0 dB, bound 15.0, 3 in a row; compression.guard=act would send "
        "it in int5h)"
    )
    assert feed(made, 14, 14, 14, 14, 15.5, 14, 14, 14) == [[]] * 8
    assert [len(events) for events in feed(made, 17, 14, 14, 14)] == [0, 0, 0, 1]


def test_a_state_goes_on_where_it_was():
    made = started()
    feed(made, 14, 14)
    again = guard(state=json.loads(json.dumps(made.state())))
    assert len(feed(again, 14)[0]) == 1 and again.moved == {WAY: "int5h"} and again.remarks == []
    third = guard(state=json.loads(json.dumps(again.state())))
    assert third.moved == again.moved and third.bound(WAY) == 15 and third.state() == again.state()


def test_a_state_of_other_codecs_starts_anew_and_one_of_another_mode_moves_nothing():
    made = started()
    feed(made, 14, 14, 14)
    other = guard(state=made.state(), codecs={WAY: "taco"})
    assert other.moved == {} and other.bound(WAY) is None
    assert other.remarks == [f"guard: {WAY} was moved to int5h, and is now in taco: it starts anew"]
    gone = guard(state=made.state(), codecs={OTHER: "int8h"})
    assert gone.remarks == [f"guard: {WAY} was moved to int5h, and is now no longer sent in a codec: it starts anew"]
    for mode in ("warn", "off"):
        told = guard(mode, state=made.state())
        assert told.moved == {} and told.bound(WAY) == 15
        assert told.remarks == [f"guard: {WAY} goes back from int5h to int4h, since compression.guard={mode}"]


def test_ladders_stay_in_the_family_and_get_better():
    names = lambda text: [text_of(codec) for codec in ladder(as_codec(text))]
    assert names("int4h") == ["int5h", "int6h", "int8h", "none"]
    assert names("int6h,block=32") == ["int8h,block=32", "none"]
    assert names("tah4")[-3:] == ["int6h", "int8h", "none"]
    assert names("mxfp4") == ["mxfp6", "mxint8", "none"] and names("mxfp6") == ["mxint8", "none"]
    assert names("taco") == ["int8h", "none"]  # in scales of its own, which no site's scale limits
    assert names("taco_paper") == ["int8h,block=256", "none"]
    assert names("e5m2") == ["int8h,rotation=none", "none"]
    assert names("int8_token") == names("int8h") == names("mxint8") == ["none"] and names("none") == []
    for codec in CODECS.values():
        rungs = [codec, *ladder(codec)] if not codec.exact else []
        gains = [NOMINAL_DB[rung.element] for rung in rungs[:-1]]
        assert gains == sorted(gains) and all(rung.rotation == codec.rotation for rung in rungs[:-1])
        assert all(rung.block == codec.block for rung in rungs[:-1])
        assert [as_codec(text_of(rung)) for rung in rungs] == rungs


@pytest.mark.parametrize("element", [e for e in NOMINAL_DB if e != tah.ELEMENT])
def test_nominal_ratios_are_those_of_normal_values(element):
    x = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    codec = Reference(element, 128, "none", "bfloat16")
    assert snr_db(x, codec.round_trip(x)) == pytest.approx(NOMINAL_DB[element], abs=0.25)


@pytest.mark.slow
def test_the_nominal_ratio_of_blocks_of_3_or_4_bits():
    x, codec = jax.random.normal(jax.random.key(1), (1 << 16,)), as_codec("tah4")
    found = snr_db(x, codec.decode(codec.encode(x), x.shape, x.dtype))
    assert found == pytest.approx(NOMINAL_DB[tah.ELEMENT], abs=0.25)


def spend(budget, cost, steps, start=0):
    """Steps of `steps` that were measured, each at this cost."""
    taken = []
    for step in range(start + 1, start + steps + 1):
        if budget.due(step):
            budget.measured(step, cost)
            taken.append(step)
    return taken


def test_measurements_take_their_share_of_the_time_and_no_more():
    for cost in (0.3, 0.9):
        taken = spend(budget := Budget(0), cost, 10_000)
        assert taken[0] == WARM_STEPS and len(taken) > 2
        assert {b - a for a, b in zip(taken[1:], taken[2:])} <= {round(cost / SHARE) + n for n in (-1, 0, 1)}
        assert all(cost * n <= SHARE * step + 1e-9 for n, step in enumerate(taken)), "the account was below 0"
        # The codecs before are measured in a step of their own, and the next measurement waits for that.
        budget.measured_former(1.2)
        assert spend(budget, cost, 20_000, start=10_000)[0] - taken[-1] == pytest.approx((cost + 1.2) / SHARE, abs=1)


def test_what_is_charged_is_usual():
    """Neither the first run of a program nor a machine that stalls once says what a measurement costs."""
    steps = [10, math.ceil(1 / SHARE), math.ceil(41 / SHARE)]
    assert spend(Budget(0), 40.0, steps[-1] + 500) == steps  # the first for one step, then what it is
    budget = Budget(0)
    for step, cost in ((10, 0.5), (20, 300.0), (30, 0.5), (40, 0.5)):
        budget.measured(step, cost)
    assert budget.state()["spent"] == pytest.approx(2.0)
    budget.measured_former(300.0)
    assert budget.state()["spent"] == pytest.approx(2.0 + 2 * 1.5)


def test_measurements_that_cost_nothing_keep_a_distance():
    assert spend(Budget(0), 0.0, 35) == [10, 20, 30]
    assert spend(Budget(100), 0.0, 55, start=100) == list(range(110, 156, 10))


def test_the_account_survives_a_resume():
    budget = Budget(0)
    assert spend(budget, 1.0, 100) == [10]
    again = Budget(100, state=json.loads(json.dumps(budget.state())))
    steps = [math.ceil(n / SHARE) for n in (1, 2)]
    assert spend(again, 1.0, steps[-1] + 10, start=100) == steps
    later = math.ceil(3 / SHARE) - 5
    assert not Budget(later, state=again.state()).due(later + 5)  # the first steps after a start are slow


def test_a_given_interval_stands_over_the_account():
    assert spend(Budget(0, every=7), 100.0, 30) == [7, 14, 21, 28]


def test_the_codecs_before_have_their_turn():
    budget, turns = Budget(0, every=1), []
    for step in range(1, 2 * FORMER_EVERY + 1):
        budget.measured(step, 0.0)
        turns.append(budget.former_due())
    assert turns.count(True) == 2 and turns[FORMER_EVERY - 1]


def test_costs_are_in_plain_steps():
    budget = Budget(0)
    assert budget.cost(3.0) == 0.0
    for seconds in (2.0, 2.0, 50.0):
        budget.plain(seconds)
    assert budget.cost(3.0) == 1.5


def test_settings_that_cannot_be():
    for fields, line in (
        ({"guard": "on"}, r"compression.guard='on': must be one of None, off, warn, act"),
        ({"guard_margin_db": 0.0}, "compression.guard_margin_db=0.0: must be above 0 and finite, such as 3"),
        ({"guard_patience": 0}, "compression.guard_patience=0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            CompressionConfig(**fields)
