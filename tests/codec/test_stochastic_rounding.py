"""The noise of stochastic rounding: the very numbers that kernels have to draw, and that they are good ones."""

import dataclasses

import jax
import numpy as np

from taco_jax import CODECS, Codec
from taco_jax.codec import stochastic_rounding

uniform = jax.jit(stochastic_rounding.uniform, static_argnums=1)
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_it_is_the_hash_of_the_docstring():
    u = np.asarray(uniform(SEED, (2, 3, 4, 8)))
    assert u.shape == (2, 3, 4, 8) and u.dtype == np.float32
    for (a, b, m, j), value in np.ndenumerate(u):
        i, p = m * 8 + j, a * 3 + b
        h = lowbias32(lowbias32(i ^ int(SEED[0])) ^ (int(SEED[1]) + p * 0x9E3779B9) & 0xFFFFFFFF)
        assert value == np.float32((h >> 8) / 2**24)


def test_messages_elements_and_seeds_differ():
    u = np.asarray(uniform(SEED, (4, 64, 128)), np.float64).reshape(4, -1)
    assert u.min() >= 0 and u.max() < 1
    assert np.abs(u.mean(1) - 0.5).max() < 5 * np.sqrt(1 / 12 / u.shape[1])
    assert np.abs(u.var(1) - 1 / 12).max() < 0.003
    other = np.asarray(uniform(SEED ^ np.array([1, 0], np.uint32), (4, 64, 128)), np.float64)[0].ravel()
    for a, b in ((u[0], u[1]), (u[1], u[3]), (u[0], other), (u[0, :-1], u[0, 1:]), (u[0, :-128], u[0, 128:])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(a.size)


def test_equal_messages_of_one_call_round_differently():
    codec = dataclasses.replace(CODECS["int4h"], rounding="stochastic")
    x = np.tile(np.random.default_rng(0).normal(size=(1, 1024)).astype(np.float32), (3, 1))
    encode = jax.jit(lambda x: codec.encode_blocks(codec.to_blocks(x), key=jax.random.key(0))[0])
    wires, one = np.asarray(encode(x)), encode(x[0])
    assert (wires[0] == one).all()  # the first of many is what one alone is
    assert (wires[0] != wires[1]).mean() > 0.1 and (wires[1] != wires[2]).mean() > 0.1


def test_the_mean_over_messages_is_the_value():
    """Unbiased within one call too, where all messages share one seed."""
    codec = Codec("int4", 32, "none", "float32", "stochastic")
    x = np.random.default_rng(1).normal(size=32).astype(np.float32)

    @jax.jit
    def round_trip(x):
        wires, _ = codec.encode_blocks(jax.numpy.broadcast_to(x, (4000, 1, 32)), key=jax.random.key(3))
        return codec.decode_blocks(wires, 1)

    y = np.asarray(round_trip(x), np.float64).reshape(4000, 32)
    assert (np.abs(y.mean(0) - x) < 5 * y.std(0) / np.sqrt(4000) + 1e-5 * np.abs(x).max()).all()
