"""The rotation: the matrix itself, its inverse, and the signs that every version must keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import ROTATIONS, block_signs, hadamard_signs
from taco_jax.codec.hadamard import rotate, unrotate

BLOCKS = (8, 16, 32, 64, 128, 256, 512)


@pytest.mark.parametrize("block", BLOCKS)
def test_matrix_is_sylvesters(block):
    i = np.arange(block)
    parity = np.bitwise_count(i[:, None] & i) % 2
    np.testing.assert_array_equal(hadamard_signs(block), np.where(parity, -1, 1))
    h = np.asarray(rotate(jnp.eye(block), "hadamard"))
    np.testing.assert_allclose(h, h.T, atol=0)
    np.testing.assert_allclose(h @ h, np.eye(block), atol=1e-6)
    np.testing.assert_allclose(h, np.where(parity, -1, 1) / np.sqrt(block), rtol=1e-7)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("block", [8, 128, 512])
def test_unrotate_inverts_and_keeps_the_norm(rotation, block):
    x = np.random.default_rng(0).normal(size=(3, 5, block)).astype(np.float32)
    z = np.asarray(jax.jit(rotate, static_argnums=1)(x, rotation))
    np.testing.assert_allclose(np.linalg.norm(z, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(unrotate, static_argnums=1)(z, rotation), x, atol=3e-6)
    assert (z == x).all() == (rotation == "none")


def test_signs_are_part_of_the_format():
    """They must be the same on every rank and in every version: old messages and kernels depend on them."""
    assert "".join("-+"[int(s > 0)] for s in block_signs(32)) == SIGNS_32
    np.testing.assert_array_equal(block_signs(128)[:32], block_signs(32))
    assert abs(block_signs(512).sum()) < 60  # about half of each
    x = np.zeros((1, 32), np.float32)
    x[0, 3] = 1
    z = rotate(jnp.asarray(x), "signed_hadamard")
    np.testing.assert_allclose(z[0], block_signs(32)[3] * hadamard_signs(32)[3] / np.sqrt(32), rtol=1e-7)


# lowbias32 of 1..32, low bit, worked out in plain Python integers
def _sign(i: int) -> str:
    i ^= i >> 16
    i = i * 0x7FEB352D % 2**32
    i ^= i >> 15
    i = i * 0x846CA68B % 2**32
    i ^= i >> 16
    return "-" if i & 1 else "+"


SIGNS_32 = "".join(_sign(i) for i in range(1, 33))


def test_sums_of_integers_are_exact():
    """The +-1 sum comes before the scale, so it is exact in float32, whatever order a kernel sums in."""
    x = np.random.default_rng(1).integers(-127, 128, (40, 128)).astype(np.float32)
    expected = (x.astype(np.float64) @ hadamard_signs(128)).astype(np.float32) * np.float32(1 / np.sqrt(128))
    np.testing.assert_array_equal(rotate(jnp.asarray(x), "hadamard"), expected)


def test_rotation_is_linear_and_spreads_an_outlier():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 4, 64)).astype(np.float32)
    both = rotate(jnp.asarray(x + y), "hadamard")
    np.testing.assert_allclose(both, rotate(x, "hadamard") + rotate(y, "hadamard"), atol=1e-5)
    spike = np.zeros((1, 64), np.float32)
    spike[0, 9] = 8
    np.testing.assert_array_equal(np.abs(rotate(jnp.asarray(spike), "hadamard")), np.ones((1, 64)))
