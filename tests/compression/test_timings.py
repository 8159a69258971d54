"""Which way a message takes by measured times (`taco_jax.compression.timings`)."""

import pytest

from taco_jax.compression import timings
from taco_jax.compression.timings import Row, Time, Way

ONE, TWO, KERNEL = Way("nccl", "one_shot"), Way("nccl", "two_shot"), Way("nvlink", "one_shot")
EVERY = lambda way: True


def row(nbytes, exact, free=10.0, **ways):
    names = {"one": ONE, "two": TWO, "kernel": KERNEL}
    time = lambda value: Time(*value) if isinstance(value, tuple) else Time(value)
    return Row(nbytes, time(free), time(exact), {names[name]: time(value) for name, value in ways.items()})


def taken(rows, nbytes, allowed=EVERY, **options):
    found = timings.decide(rows, nbytes, allowed, **options)
    return found and found[0]


def test_a_way_pays_beyond_both_spreads_and_the_margin():
    # The exact sum takes 100 us of 110: 5 us is the least that counts.
    assert row(1, 110.0, one=104.9).pays(ONE) and not row(1, 110.0, one=105.1).pays(ONE)
    assert not row(1, (110.0, 4.0), one=(102.0, 4.5)).pays(ONE)
    assert row(1, (110.0, 4.0), one=(102.0, 3.9)).pays(ONE)


def test_at_a_measured_size_the_fastest_that_pays():
    rows = [row(100, 40.0, one=50.0, two=39.9), row(200, 60.0, one=50.0, two=40.0), row(400, 90.0, one=30.0, two=95.0)]
    assert [taken(rows, n) for n in (100, 200, 400)] == [None, TWO, ONE]
    assert timings.decide(rows, 400, EVERY) == (ONE, 400)


def test_between_sizes_what_pays_at_both():
    rows = [row(100, 40.0, one=20.0, two=30.0), row(200, 60.0, one=70.0, two=50.0), row(400, 90.0, one=30.0, two=95.0)]
    # one_shot is the fastest at 100 bytes, and slower than exact at 200; at 400 two_shot is.
    assert taken(rows, 101) == taken(rows, 199) == TWO
    assert taken(rows, 201) is None and taken(rows, 399) is None
    crossing = [row(100, 90.0, one=20.0, two=40.0), row(200, 90.0, one=60.0, two=40.0)]
    assert [taken(crossing, n) for n in (100, 149, 151, 200)] == [ONE, ONE, TWO, TWO]


def test_outside_of_the_measured_sizes():
    rows = [row(100, 40.0, one=20.0), row(200, 60.0, one=30.0)]
    assert taken(rows, 99) is None and taken(rows, 1 << 40) == ONE
    assert taken([row(100, 40.0, one=20.0), row(200, 60.0, one=59.0)], 1 << 40) is None
    assert taken([], 100) is None


def test_only_ways_that_are_open():
    rows = [row(100, 90.0, kernel=20.0, one=40.0, two=100.0)]
    separate = lambda way: way.link == "nccl"
    assert taken(rows, 100) == KERNEL and taken(rows, 100, separate) == ONE
    assert taken(rows, 100, lambda way: way == TWO) is None
    assert taken(rows, 100, lambda way: way == TWO, forced=True) == TWO


def test_what_must_be_compressed_takes_the_fastest_way():
    rows = [row(100, 20.0, one=50.0, two=40.0), row(200, 20.0, one=30.0, two=40.0)]
    assert taken(rows, 100) is None
    assert [taken(rows, n, forced=True) for n in (1, 100, 120, 180, 200, 500)] == [TWO, TWO, TWO, ONE, ONE, ONE]
    # Nothing was measured at both ends: what is the fastest at the smaller one.
    apart = [row(100, 20.0, one=50.0), row(200, 20.0, two=40.0)]
    assert taken(apart, 150, forced=True) == ONE and taken(apart, 150) is None


@pytest.mark.parametrize("one, two, expected", [(20, 20, 100), (50, 20, 200), (20, 70, None), (50, 70, None)])
def test_the_threshold(one, two, expected):
    rows = [row(200, 60.0, one=float(two)), row(100, 40.0, one=float(one))]
    assert timings.threshold(rows, EVERY) == expected
    assert timings.threshold(rows, lambda way: way == TWO) is None
