"""How large values may be: where blocks of finite values come back finite, as the top of `taco_jax/codec/codec.py`
says."""

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from taco_jax.codec import CODECS, TOKEN

HALF = 2.0**127  # half of the largest values of float32 and bfloat16


def limit(codec) -> float:
    if codec.scale == "paper":
        return 1e18
    return HALF if codec.rotation == "none" else HALF / codec.block


def come_back(codec, size: float, dtype, n: int = 512) -> np.ndarray:
    """Three messages there and back: one sign, which adds up most in a rotation, signs at random, one value alone."""
    signs = np.ones((3, n)) * size
    signs[1] *= np.random.default_rng(0).choice([-1, 1], n)
    signs[2, 1:] = 0
    there_and_back = lambda row: codec.decode(codec.encode(row), row.shape, row.dtype)
    return np.asarray(jax.jit(jax.vmap(there_and_back))(signs.astype(dtype)), np.float64) / size


@pytest.mark.parametrize(
    "name, dtype",
    [(name, np.float32) for name in ("taco", "taco_paper", "int4h", "e4m3", "int8_token", "tah4", "mxfp4")]
    + [("taco", ml_dtypes.bfloat16), ("e4m3", np.float16)],
)
def test_values_up_to_the_limit(name, dtype):
    """Scaled down they are what ordinary values become, each kind of scale and rotation once."""
    codec = CODECS[name] if CODECS[name].block != TOKEN else dataclasses.replace(CODECS[name], block=128)
    size = min(limit(codec), 2.0**15 if dtype == np.float16 else np.inf)
    got = come_back(codec, size, dtype)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, come_back(codec, 1.0, np.float32), atol=0.06)


@pytest.mark.parametrize("name, size", [("taco", 2.0**122), ("int4h", 2.0**122), ("taco_paper", 1e20)])
def test_values_beyond_it_are_nan_and_never_something_else(name, size):
    """Not yet served: a rotation and the paper's mean of squares add up before anything is scaled."""
    got = come_back(CODECS[name], size, np.float32)[0]
    assert np.isnan(got).all() or np.allclose(got, 1, atol=0.06)
