"""Element formats against ml_dtypes: every code, every rounding border, and stochastic rounding."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from reference_codec import SMALL_FLOATS, round_to

from pallas_kernels.formats import ELEMENTS
from taco_jax.codec.elements import from_codes, to_codes

pytestmark = pytest.mark.usefixtures("optimised")

FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
SMALL = {name: np.concatenate([-values[:0:-1], values]) for name, values in SMALL_FLOATS.items()}  # ml_dtypes has none
INTEGERS = {"int8": 8, "int6": 6, "int5": 5, "int4": 4, "int3": 3}
codes_of = jax.jit(to_codes, static_argnums=0)
values_of = jax.jit(from_codes, static_argnums=0)


def finite_codes(name) -> np.ndarray:
    codes = np.arange(1 << ELEMENTS[name].bits).astype(np.uint8)
    return codes[np.isfinite(codes.view(FLOATS[name]).astype(np.float32))]


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_has_the_value_of_ml_dtypes(name):
    codes = np.arange(1 << ELEMENTS[name].bits).astype(np.uint8)
    expected = codes.view(FLOATS[name]).astype(np.float32)
    expected[np.isinf(expected)] *= np.nan  # e5m2 has codes for Inf; no encoder writes them, and they read as NaN
    values = np.asarray(values_of(ELEMENTS[name], codes))
    np.testing.assert_array_equal(values, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(expected[number]))
    assert np.nanmax(expected[np.isfinite(expected)]) == ELEMENTS[name].maximum
    assert ELEMENTS[name].nan is None or np.isnan(expected[ELEMENTS[name].nan])


@pytest.mark.parametrize("name", FLOATS)
def test_values_round_as_in_ml_dtypes(name):
    """All values, all ties between neighbours, a float32 step to either side of both, and a random sweep."""
    values = np.sort(finite_codes(name).view(FLOATS[name]).astype(np.float32))
    borders = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    rng = np.random.default_rng(0)
    sweep = rng.choice([-1, 1], 20000) * np.exp2(rng.uniform(-20, np.log2(ELEMENTS[name].maximum), 20000))
    x = np.concatenate([borders, np.nextafter(borders, np.inf), np.nextafter(borders, -np.inf), sweep])
    x = np.clip(x, -ELEMENTS[name].maximum, ELEMENTS[name].maximum).astype(np.float32)
    x = x[(np.abs(x) > 1e-37) | (x == 0)]  # XLA flushes subnormals
    np.testing.assert_array_equal(codes_of(ELEMENTS[name], x), x.astype(FLOATS[name]).view(np.uint8))


def test_all_elements_are_here():
    assert {*FLOATS, *SMALL, *INTEGERS} == {*ELEMENTS}


@pytest.mark.parametrize("name", SMALL)
def test_small_floats_have_the_values_of_their_definition_and_round_to_the_nearest(name):
    element, values = ELEMENTS[name], SMALL_FLOATS[name]
    assert element.bits == 1 + int(name[1]) + int(name[3]) and element.maximum == values[-1] and element.nan is None
    codes = np.arange(1 << element.bits).astype(np.uint8)
    np.testing.assert_array_equal(values_of(element, codes), np.concatenate([values, -values]))
    borders = np.concatenate([SMALL[name], (SMALL[name][1:] + SMALL[name][:-1]) / 2])
    sweep = np.random.default_rng(0).uniform(-element.maximum, element.maximum, 5000).astype(np.float32)
    x = np.concatenate([borders, np.nextafter(borders, np.float32(9)), np.nextafter(borders, np.float32(-9)), sweep])
    x = np.clip(x, -element.maximum, element.maximum).astype(np.float32)
    x = x[(np.abs(x) > 1e-37) | (x == 0)]  # XLA flushes subnormals
    np.testing.assert_array_equal(codes_of(element, x), round_to(values, x, element.bits))


def test_small_floats_by_hand():
    assert SMALL_FLOATS["e1m2"].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert SMALL_FLOATS["e2m2"].tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7]
    assert SMALL_FLOATS["e3m1"].tolist() == [0, 1 / 8, 1 / 4, 3 / 8, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24]


NOISE = np.random.default_rng(1).random((5000, 203), np.float32)


@functools.partial(jax.jit, static_argnums=0)
def rounded_both_ways(element, x, noise):
    """(values to the nearest, values by each row of noise) of x."""
    rows = jnp.broadcast_to(x, noise.shape)
    return from_codes(element, to_codes(element, x)), from_codes(element, to_codes(element, rows, noise))


@pytest.mark.parametrize("name", ELEMENTS)
def test_values_beyond_the_maximum_clip(name):
    element = ELEMENTS[name]
    m = np.float32(element.maximum)
    x = np.resize(np.array([m, 1.01 * m, 1.04 * m, 2 * m, 1e30, np.inf], np.float32), NOISE.shape[1])
    for sign in (1, -1):
        for values in rounded_both_ways(element, sign * x, np.full_like(NOISE, 0.999)):
            assert (np.asarray(values) == sign * m).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_symmetric_twos_complement_and_round_to_even(name):
    element, bits = ELEMENTS[name], INTEGERS[name]
    top = 2 ** (bits - 1) - 1
    assert (element.bits, element.maximum) == (bits, top)
    x = np.arange(-4 * top, 4 * top + 1) / np.float32(4)
    codes = np.asarray(codes_of(element, x))
    expected = np.rint(x).astype(np.int64)
    np.testing.assert_array_equal(codes, expected % (1 << bits))
    np.testing.assert_array_equal(values_of(element, codes), expected)
    assert element.nan == 1 << (bits - 1) and element.nan not in codes


def test_integer_borders_by_hand():
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 6.4999, 6.5], np.float32)
    codes = np.asarray(codes_of(ELEMENTS["int4"], x))
    assert list(codes) == [0, 2, 2, 0, 14, 14, 6, 6]
    assert list(np.asarray(values_of(ELEMENTS["int4"], codes))) == [0, 2, 2, 0, -2, -2, 6, 6]


@pytest.mark.parametrize("name", ELEMENTS)
def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(name):
    element = ELEMENTS[name]
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, 200) * np.exp2(rng.uniform(-6, 0, 200)) * element.maximum
    x = np.concatenate([x, [0, element.maximum, -element.maximum]]).astype(np.float32)
    y = np.asarray(rounded_both_ways(element, x, NOISE)[1], np.float64)
    if name in FLOATS:
        grid = np.unique(finite_codes(name).view(FLOATS[name]).astype(np.float64))
    elif name in SMALL:
        grid = SMALL[name].astype(np.float64)
    else:
        grid = np.arange(-element.maximum, element.maximum + 1)
    above = np.searchsorted(grid, x)
    low, high = grid[np.maximum(above - 1, 0)], grid[above]
    low = np.where(high == x, x, low)
    assert ((y == low) | (y == high)).all()
    chance = np.where(high > low, (x - low) / np.where(high > low, high - low, 1), 0)
    deviation = np.sqrt(chance * (1 - chance) / 5000) * (high - low)
    assert (np.abs(y.mean(0) - x) <= 5 * deviation + 1e-6 * np.abs(x) + 1e-12).all()
