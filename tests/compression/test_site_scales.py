"""Site scales: when an exponent moves, what the history keeps, and the loop of people who bring their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from reference_codec import REFERENCES, snr_db
from shards import per_rank

import taco_jax
from taco_jax import UNCALIBRATED, SiteScales
from taco_jax.codec.block_scale import ceil_log2
from taco_jax.compression.site_scales import (
    ScaleState,
    fork,
    merge_uses,
    new_scale_state,
    stack_uses,
    update_scale_state,
    update_scales,
)

update = jax.jit(update_scale_state)


def amax(forward, backward):
    return np.array([forward, backward], np.float32)


def test_a_new_state_is_uncalibrated():
    state = new_scale_state((3,), history=4)
    assert state.exponents.shape == (3, 2) and state.exponents.dtype == np.int32
    assert (state.exponents == UNCALIBRATED).all() and UNCALIBRATED == -(2**31)
    assert state.history.shape == (3, 2, 4) and state.history.dtype == np.float32 and not state.history.any()
    assert new_scale_state().history.shape == (2, 16)
    with pytest.raises(ValueError, match="history=0: must be at least 1 step"):
        new_scale_state(history=0)


@pytest.mark.parametrize(
    "s,exponent",
    [
        (1.0, 0), (1.0000001, 1), (0.9999999, 0), (0.5, -1), (0.5000001, 0), (3.0, 2), (4.0, 2), (2.0**-100, -100),
        (1e30, 100),
    ],
)  # fmt: skip
def test_exponent_is_ceil_log2(s, exponent):
    assert int(ceil_log2(jnp.float32(s))) == exponent
    assert list(update(new_scale_state(), amax(s, s)).exponents) == [exponent] * 2


def test_the_largest_of_the_history_counts():
    state = new_scale_state(history=3)
    seen = []
    for s in (8, 0.5, 2, 1, 0.25, 0.25):
        state = update(state, amax(s, 1))
        seen.append(int(state.exponents[0]))
    assert seen == [3, 3, 3, 1, 1, 0]  # 8 is forgotten after three steps, 2 after three more
    np.testing.assert_array_equal(state.history[0], [0.25, 0.25, 1])  # newest first
    assert int(state.exponents[1]) == 0


@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
def test_a_zero_or_non_finite_maximum_changes_nothing(bad):
    state = update(new_scale_state(history=2), amax(3, 5))
    after = update(state, amax(bad, 9))
    assert int(after.exponents[0]) == 2 and int(after.exponents[1]) == 4
    np.testing.assert_array_equal(after.history, [[3, 0], [9, 5]])  # each direction for itself
    untouched = update(new_scale_state(), amax(bad, bad))
    assert (untouched.exponents == UNCALIBRATED).all() and not np.asarray(untouched.history).any()


def test_a_skipped_step_leaves_everything():
    state = update(new_scale_state(history=2), amax(3, 5))
    after = update(state, amax(100, 100), False)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    jax.tree.map(np.testing.assert_array_equal, update(state, amax(100, 100), True), update(state, amax(100, 100)))


def test_stacked_sites_are_independent():
    maxima = np.array([[1, 2], [0, 16], [np.nan, 4]], np.float32)
    state = update(new_scale_state((3,), 2), maxima)
    assert np.asarray(state.exponents).tolist() == [[0, 1], [UNCALIBRATED, 4], [UNCALIBRATED, 2]]


def test_update_scales_walks_a_tree():
    """Linen's nesting: a `site_scale` collection and slots float32[devices, 2, K] in the gradient."""
    state = {
        "block": {name: new_scale_state(history=2)._asdict() for name in ("up", "down")},
        "head": new_scale_state((3,), 2)._asdict(),
    }
    slot = np.zeros((4, 2, 1), np.float32)
    slot[:, 0, 0], slot[:, 1, 0] = [1, 2, 7, 3], [0.1, 0, 0, 0]
    stacked = np.zeros((4, 3, 2, 6), np.float32)
    stacked[2, 1, :, 0], stacked[..., 1] = 4, 1e9  # column 0 is the amax; statistics follow
    grads = {
        "block": {"up": {"amax_slot": slot, "kernel": np.ones(3)}, "down": {"amax_slot": 0 * slot}},
        "head": {"amax_slot": stacked},
    }
    new = update_scales(state, grads)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert list(map(int, new["block"]["up"]["exponents"])) == [3, -3]
    assert list(map(int, new["block"]["down"]["exponents"])) == [UNCALIBRATED] * 2
    assert np.asarray(new["head"]["exponents"]).tolist() == [[UNCALIBRATED] * 2, [2, 2], [UNCALIBRATED] * 2]
    del grads["block"]["down"]
    with pytest.raises(ValueError, match="update_scales: no gradient for the amax slot of 'block/down'"):
        update_scales(state, grads)


def test_update_scales_takes_scale_states():
    new = update_scales({"site": new_scale_state()}, {"site": {"amax_slot": np.full((2, 2, 1), 3, np.float32)}})
    assert isinstance(new["site"], ScaleState) and list(map(int, new["site"].exponents)) == [2, 2]


def test_uses_of_one_site_are_merged():
    """The largest scale of several uses and the sum of their statistics; their exponents are the same."""
    rng = np.random.default_rng(0)
    measures = rng.random((3, 2, 6)).astype(np.float32)
    measures[1, 0, 0] = np.nan
    site = SiteScales(jnp.array([1, 2]), jnp.zeros((2, 6)))

    def loss(slot):
        uses = fork(SiteScales(site.exponents, slot), 3)
        assert all(use.exponents is site.exponents for use in uses)
        return sum(jnp.sum(use.slot * measure) for use, measure in zip(uses, measures, strict=True))

    merged = np.asarray(jax.grad(loss)(site.slot))
    np.testing.assert_array_equal(merged, merge_uses(jnp.asarray(measures)))
    np.testing.assert_array_equal(merged[:, 0], measures[..., 0].max(0))  # NaN where there is one
    np.testing.assert_allclose(merged[:, 1:], measures[..., 1:].sum(0), rtol=1e-6)
    assert fork(None, 2) == [None] * 2 and fork(site, 1) == [site]
    assert [use.slot for use in fork(SiteScales(site.exponents), 2)] == [None] * 2


def test_uses_of_a_loop_are_merged_too():
    measures = np.random.default_rng(2).random((5, 3, 2, 6)).astype(np.float32)
    slot = jnp.zeros((3, 2, 6))
    merged = jax.grad(lambda slot: jnp.sum(stack_uses(slot, 5) * measures))(slot)
    np.testing.assert_array_equal(merged, merge_uses(jnp.asarray(measures)))


def test_the_loop_calibrates_a_site():
    """Step by step as a trainer does it: after one step the exponents fit the data of both directions."""
    x_P = 1e-3 * np.random.default_rng(0).normal(size=(4, 8, 256)).astype(np.float32)

    def local(x, slot, exponents):
        def loss(slot):
            y = taco_jax.psum_scatter(x, "tp", tiled=True, compression="taco", scales=SiteScales(exponents, slot))
            return jnp.sum(y * 1e4 * jnp.cos(jnp.arange(256.0)))

        y = taco_jax.psum_scatter(x, "tp", tiled=True, compression="taco", scales=SiteScales(exponents))
        return y, jax.grad(loss)(slot)

    # Uncalibrated and calibrated are one program: the exponent is data.
    program = per_rank(local, 4)
    slots = np.zeros((4, 2, 1), np.float32)
    state, exact = new_scale_state(), x_P.sum(0)
    for _ in range(3):
        y, slots_out = program(x_P, slots, np.tile(state.exponents, (4, 1)))
        assert snr_db(exact, np.asarray(y).reshape(exact.shape)) > 31
        state = update_scale_state(state, slots_out[..., 0].max(0))
    z = np.concatenate([REFERENCES["taco"].to_blocks(x) for x in x_P])
    assert int(state.exponents[0]) == np.ceil(np.log2(np.abs(z).max() / 448))
    assert int(state.exponents[1]) - int(state.exponents[0]) in range(20, 27)  # 1e4 against 1e-3: 2^23
    assert program._cache_size() == 1
    assert {
        dtype for _, dtype, _ in collectives(program.lower(x_P, slots, np.tile(state.exponents, (4, 1))).compile())
    } == {"uint8"}
