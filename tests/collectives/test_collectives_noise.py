"""What a sum loses: by its hops, and by the noise of stochastic rounding on every rank."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_codec import snr_db
from shards import per_rank

import taco_jax
from taco_jax import CODECS, Codec, Compression
from taco_jax.collectives.message import Label, Message

LIMITS = {(2, "auto"): (-0.3, 0.3), (4, "auto"): (2.2, 2.7), (8, "auto"): (2.5, 3.0), (4, "one_shot"): (-0.3, 0.3)}
FEW = [("taco", 2, "auto"), ("taco", 4, "one_shot"), ("int8h", 4, "auto"), ("int4h", 8, "auto")]
ALL = [(codec, *how) for codec in ("taco", "e4m3", "int8h", "int4h") for how in LIMITS]
SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("codec,ranks,algorithm", [*FEW, *(SLOW(*case) for case in ALL if case not in FEW)])
def test_what_two_shot_loses(codec, ranks, algorithm):
    """(P-1)/P of the terms are quantised, then the sum: 10 log10(1 + (P-1)/P) dB. One hop loses nothing."""
    rng = np.random.default_rng(0)
    x_P = rng.normal(size=(8, 1 << 14)).astype(np.float32)
    one_hop = {"taco": 31.6, "e4m3": 31.8, "int8h": 43.7, "int4h": 18.6}[codec]
    low, high = LIMITS[ranks, algorithm]
    f = per_rank(
        lambda x: taco_jax.psum(x, "tp", compression=Compression(codec, algorithm=algorithm)), ranks, invarying_out=True
    )
    loss = one_hop - snr_db(x_P[:ranks].sum(0, dtype=np.float64), f(x_P[:ranks]))
    assert low <= loss <= high


def test_every_rank_hop_chunk_and_direction_has_a_key_of_its_own():
    codec = dataclasses.replace(CODECS["int8h"], rounding="stochastic")

    def keys(key):
        of = lambda direction, hop, chunk: Message("tp", Compression(codec), codec, Label("", direction)).key(
            key, hop, chunk
        )
        every = itertools.product(("forward", "backward"), (0, 1), (0, 1, 2))
        return jnp.stack([jax.random.key_data(of(*which)) for which in every])

    found = np.asarray(per_rank(keys, 4)(jnp.stack([jax.random.key(0)] * 4)))
    assert len(np.unique(found.reshape(-1, found.shape[-1]), axis=0)) == 4 * 12


def test_stochastic_rounding_differs_on_every_rank():
    """Equal noise on all ranks would not average out: a sum's error would grow with P instead of its square root."""
    codec = Codec("int4", 128, "none", "bfloat16", "stochastic")
    x_P = np.tile(np.random.default_rng(0).normal(size=4096).astype(np.float32), (8, 1))

    def summed(n, seed):
        f = lambda x: taco_jax.psum(
            x, "tp", compression=Compression(codec, algorithm="one_shot"), key=jax.random.key(seed)
        )
        return np.asarray(per_rank(f, n, invarying_out=True)(x_P[:n]))

    one, eight = summed(2, 3), summed(8, 3)
    errors = [np.std(np.asarray(y) - n * x_P[0]) for y, n in ((one, 2), (eight, 8))]
    assert errors[1] / errors[0] == pytest.approx(2, rel=0.1)  # not 4
    assert (summed(2, 4) != one).any()
    with pytest.raises(ValueError, match="needs key="):
        per_rank(lambda x: taco_jax.psum(x, "tp", compression=codec), 2, invarying_out=True)(x_P[:2])


@pytest.mark.parametrize("make", [jax.random.PRNGKey, functools.partial(jax.random.key, impl="rbg")])
def test_keys_of_every_kind(make):
    x_P, key = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32), make(0)
    codec = dataclasses.replace(CODECS["int8h"], rounding="stochastic")
    loss = lambda x: jnp.sum(taco_jax.psum(x, "tp", compression=codec, key=key) ** 2) / 2
    np.testing.assert_allclose(per_rank(jax.grad(loss), 2)(x_P)[0], x_P.sum(0), atol=0.2)
