"""Site scales through the collectives' gradients: what the amax slots receive, and which exponent is used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import COLLECTIVES, relative, slots_of, weights, x_of
from helpers import make_mesh
from jax.sharding import PartitionSpec as P
from reference_codec import ELEMENTS, REFERENCES
from shards import per_rank

import taco_jax
from taco_jax import Compression, SiteScales
from taco_jax.compression.site_scales import STATS_WIDTH


def largest(ref, x):
    return np.abs(ref.to_blocks(x)).max() / ELEMENTS[ref.element][1]


@pytest.mark.parametrize("hop", ["first", "second"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_slot_of_a_psum_is_the_largest_scale_of_both_hops(algorithm, hop):
    ref, a = REFERENCES["taco"], -5
    base = np.random.default_rng(0).normal(size=4 * 600).astype(np.float32)
    # Equal terms add up to a second hop of 4 times the scale; terms that cancel make the first hop the larger one.
    signs = np.array([1, 1, 1, 1] if hop == "second" else [1, -1, 1, -1], np.float32)
    tilt = np.array([1, 1.5, 0.7, 0.3], np.float32)  # so that the ranks differ
    x_P = base * (signs * tilt)[:, None]
    f = lambda x, scales: jnp.sum(
        taco_jax.psum(x, "tp", compression=Compression("taco", algorithm=algorithm), scales=scales)
    )
    slots, _ = slots_of(f, 4, x_P, np.array([a, 7], np.int32))

    n = 128 * 5  # 2,400 elements: 19 blocks, 5 to a rank
    chunks = np.pad(x_P, ((0, 0), (0, 4 * n - 2400))).reshape(4, 4, n)
    for rank in range(4):
        expected = largest(ref, x_P[rank])
        if algorithm == "two_shot":
            total = np.float32(0)
            for p in range(4):
                z = ref.to_blocks(chunks[p, rank])
                total = total + (z if p == rank else ref.encode_blocks(z, a)[1])
            second = np.abs(total).max() / 448
            assert (second > expected) == (hop == "second")
            expected = max(expected, second)
        assert slots[rank, 0, 0] == pytest.approx(expected, rel=1e-5)
        assert slots[rank, 1, 0] == 0  # psum has no backward message


@pytest.mark.parametrize("name", ["psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_slots_of_both_directions(name):
    ref = REFERENCES["int8h"]
    x_P = x_of(4) * np.array([1, 2, 3, 4], np.float32)[:, None, None]
    f = COLLECTIVES[name][0]
    w = lambda y: weights(y) * 100

    def loss(x, scales):
        y = f(taco_jax, x, compression="int8h", scales=scales)
        return jnp.sum(w(y) * y)

    slots, _ = slots_of(loss, 4, x_P, np.array([-3, -2], np.int32))
    y_shape = {"psum_scatter": (8, 12), "all_gather": (8, 192), "all_to_all": (32, 12), "ppermute": (8, 48)}[name]
    for rank in range(4):
        pieces = np.split(x_P[rank], 4, axis=1) if name in ("psum_scatter", "all_to_all") else [x_P[rank]]
        assert slots[rank, 0, 0] == pytest.approx(max(largest(ref, p) for p in pieces), rel=1e-5)
        ct = np.cos(np.arange(np.prod(y_shape)) * 0.37).reshape(y_shape).astype(np.float32) * (1 + rank) * 100
        axis = {"all_gather": 1, "all_to_all": 0}.get(name)
        pieces = [ct] if axis is None else np.split(ct, 4, axis=axis)
        assert slots[rank, 1, 0] == pytest.approx(max(largest(ref, p) for p in pieces), rel=1e-4)


def test_slot_of_copy_has_only_a_backward_message():
    ref = REFERENCES["taco"]
    mesh = make_mesh(tp=4)
    x, w_P = x_of(1)[0], x_of(4)

    def local(x, w, slot):
        f = lambda slot: jnp.sum(
            w[0]
            * taco_jax.copy(
                x, "tp", compression=Compression("taco", algorithm="one_shot"), scales=SiteScales(None, slot)
            )
        )
        return jax.grad(f)(slot[0])[None]

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("tp"), P("tp")), out_specs=P("tp")))
    slots = np.asarray(f(x, w_P, np.zeros((4, 2, 1), np.float32)))
    for rank in range(4):
        assert slots[rank, 0, 0] == 0 and slots[rank, 1, 0] == pytest.approx(largest(ref, w_P[rank]), rel=1e-5)


def test_slots_are_nan_where_data_is_and_zero_where_it_is_zero():
    f = lambda x, scales: jnp.sum(taco_jax.psum_scatter(x, "tp", tiled=True, compression="taco", scales=scales))
    x_P = np.zeros((2, 4, 8), np.float32)
    slots, _ = slots_of(f, 2, x_P, np.zeros(2, np.int32))
    assert (slots[:, 0] == 0).all() and (slots[:, 1] > 0).all()
    x_P[1, 0, 0] = np.inf
    slots, _ = slots_of(f, 2, x_P, np.zeros(2, np.int32))
    assert slots[0, 0, 0] == 0 and not np.isfinite(slots[1, 0, 0])


def test_wide_slots_carry_statistics():
    x_P = x_of(4)
    f = lambda x, scales: jnp.sum(
        taco_jax.psum(x, "tp", compression=Compression("int8h", algorithm="one_shot"), scales=scales)
    )
    slots, _ = slots_of(f, 4, x_P, np.zeros(2, np.int32), width=STATS_WIDTH)
    amax, signal, noise, clipped, flushed, count = slots[:, 0].T
    assert (slots[:, 1] == 0).all()
    np.testing.assert_allclose(amax, [largest(REFERENCES["int8h"], x) for x in x_P], rtol=1e-5)
    np.testing.assert_allclose(signal, (x_P**2).sum((1, 2)), rtol=1e-4)
    assert (10 * np.log10(signal / noise) == pytest.approx(43.7, abs=1)) and (count == 384).all()
    assert (clipped == 0).all() and (flushed < 8).all()


def test_exponents_and_slots_change_no_gradient_and_exponents_no_types():
    x_P = x_of(4)
    w = weights

    def loss(x, scales):
        y = taco_jax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True, compression="int8h", scales=scales)
        return jnp.sum(w(y) * y)

    _, with_slot = slots_of(loss, 4, x_P, np.zeros(2, np.int32))
    without = np.asarray(per_rank(jax.grad(lambda x: loss(x, None)), 4)(x_P))
    np.testing.assert_array_equal(with_slot, without)  # int8h has a bfloat16 scale: exponents do not matter


def test_each_direction_uses_its_own_exponent():
    x_P = x_of(4)

    def loss(x, exponents):
        y = taco_jax.psum_scatter(x, "tp", tiled=True, compression="taco", scales=SiteScales(exponents, None))
        return jnp.sum(jnp.sin(3 * y))

    program = per_rank(jax.grad(loss), 4)  # exponents are data: one program for all

    def run(exponents):
        return np.asarray(program(x_P, np.tile(np.array(exponents, np.int32), (4, 1))))

    good, forward_off, backward_off = run([-6, -6]), run([-40, -6]), run([-6, -40])
    assert relative(run([-3, -3]), good) < 0.1
    # 40 bits too low everything clips at 2^-40 * 2^16 * 1.75 * 448: a hop then sends next to nothing.
    assert relative(forward_off, good) > 0.3
    own = np.stack([backward_off[r, 2 * r : 2 * r + 2] for r in range(4)])
    assert relative(backward_off, good) > 0.3 and np.abs(own).max() < 1e-3


def test_a_slot_that_varies_too_little_is_an_error():
    def local(x):
        return jax.grad(
            lambda slot: jnp.sum(taco_jax.psum(x, "tp", compression="taco", scales=SiteScales(None, slot)))
        )(jnp.zeros((2, 1)))

    with pytest.raises(ValueError, match="amax slot: it must vary over"):
        per_rank(local, 2)(x_of(2))
