"""What kernels are compared on, and how closely: arrays of several kinds of blocks, wires, and values.

Everything here is numpy: the reference runs on the CPU, wherever the kernels run.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Geometry, KernelSpec, choose
from taco_jax import Codec
from taco_jax.compression import dispatch

SIZES = (1, 7, 127, 128, 129, 8191, 8193, 2**14 + 3)
KINDS = ("gaussian", "zero", "inf", "nan", "huge", "tiny")
# Of blocks in turn. A prime number of them, few of which are not finite: ranks' shares begin at other kinds, and of the
# sums of four ranks some are finite.
MIXED = (*KINDS, "gaussian", "zero", "gaussian", "tiny", "gaussian", "huge", "gaussian")
# A calibrated site's.
EXPONENTS = {"ue5m3": -4, "site": -2}


def skip_without_mosaic() -> None:
    """Skips a test where the first device takes other kernels, or none, with the reason."""
    spec = KernelSpec("encode", "taco", "e4m3", 128, "hadamard", "ue5m3", "bfloat16", 1 << 20)
    name, reason = choose(spec, jax.devices()[0])
    if name != "mosaic":
        pytest.skip(f"needs a GPU that runs mosaic kernels: {reason}")


def values(size: int, kind: str, block: int, dtype: str, seed: int = 0) -> np.ndarray:
    """dtype[size] of one kind, or ("mixed") of blocks of all kinds in turn."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size).astype(np.float32)
    n_blocks = -(-size // block)
    for b in range(n_blocks if kind != "gaussian" else 0):
        which = MIXED[b % len(MIXED)] if kind == "mixed" else kind
        part = x[b * block : (b + 1) * block]
        if which in ("inf", "nan"):
            # One in every message would leave nothing to compare: one in every few blocks.
            if kind == "mixed" or b % 3 == 0:
                part[rng.integers(part.size)] = np.inf if which == "inf" else np.nan
        else:
            part *= {"gaussian": 1.0, "zero": 0.0, "huge": 1e30, "tiny": 1e-30}[which]
    with np.errstate(over="ignore"):
        return x.astype(jnp.dtype(dtype))


def shares(codec: Codec, size: int, ranks: int) -> Geometry:
    """How a collective cuts x: shares of whole blocks, or the whole array."""
    if ranks == 1:
        return Geometry(size, 1, size)
    return Geometry(size, ranks, codec.block * -(-codec.n_blocks(size) // ranks))


def arguments(geometry, dtype, operation, x, wires, exponent, random, rank) -> list:
    """Of an operation, after its format; jnp's differ from the kernels' only in the last: a key, not its seed."""
    x, rank, n = [x], [jnp.int32(rank)], geometry.per_message
    return {
        "encode": [geometry, *x, exponent, random],
        "reduce_encode": [geometry, wires, *x, *rank, exponent, random],
        "reduce_decode": [geometry, wires, *x, *rank, exponent],
        "sum_decode": [wires, n, dtype, exponent],
        "decode": [geometry, wires, dtype, exponent],
    }[operation]


def reference(codec: Codec, geometry, dtype, operation, x, exponent=None, key=None, rank=0):
    """(what the jnp codec gives on the CPU, the wires of x that it read), as numpy arrays."""

    @jax.jit
    def run(x, exponent, key):
        first = wires, _ = dispatch.encode(codec, geometry, x, exponent, key, backend="jnp")
        if operation == "encode":
            return first, wires
        given = arguments(geometry, dtype, operation, x, wires, exponent, key, rank)
        return getattr(dispatch, operation)(codec, *given, backend="jnp"), wires

    with jax.default_device(jax.devices("cpu")[0]):
        exponent = None if exponent is None else jnp.int32(exponent)
        return jax.tree.map(np.asarray, run(x, exponent, key))


def check_wires(codec: Codec, n: int, operation: str, ours, theirs, most: float = 2e-4, exact: bool = False) -> None:
    """Bytes of messages of n elements are equal but for a share `most` of them, and the largest scale too.

    A rotation sums in another order, and a sum of wires may round once less (a fused multiply-add): then a value that
    lies on a rounding border may fall on its other side. exact: where nothing is summed there is nothing to differ.
    A sum of -0 and the +0 beyond x's end has no defined sign: XLA takes x + 0 for x. Such codes count as equal.
    Scales of float32 have no borders: their last bits are those of the sums, equal to the tolerance of the largest one.
    """
    (wires, largest), (wanted, measure) = ours, theirs
    assert wires.shape == wanted.shape and wires.dtype == jnp.uint8
    wires = np.asarray(wires)
    elements = _different_elements(codec, n, wires, wanted) if operation.startswith("reduce") else wires.size
    exact = exact and operation == "encode" and codec.rotation == "none"
    if codec.scale == "float32" and not exact:
        (offset, length), *planes = dispatch.to_format(codec).sections(n)
        scale = lambda w: np.stack([w[..., o : o + m] for o, m in planes], -1).view(np.float32)
        np.testing.assert_allclose(scale(wires), scale(wanted), rtol=2e-6)  # NaN equals NaN
        wires, wanted = (w[..., offset : offset + length] for w in (wires, wanted))
    different = min(int((wires != wanted).sum()), elements)
    assert different <= (0 if exact else max(1, most * wanted.size)), different
    largest, wanted = float(largest), float(measure[0])
    if np.isfinite(wanted):
        np.testing.assert_allclose(largest, wanted, rtol=2e-6)
    else:
        assert not np.isfinite(largest)


def _different_elements(codec: Codec, n: int, wires, wanted) -> int:
    """How many of the values that the codes stand for differ; 0 and -0 do not, nor do two NaN."""
    plain = dataclasses.replace(codec, rotation="none")
    decode = lambda w: np.asarray(plain.decode_blocks(jnp.asarray(w), plain.n_blocks(n), exponent=jnp.int32(0)))
    return int((~np.isclose(decode(wires), decode(wanted), rtol=0, atol=0, equal_nan=True)).sum())


def check_values(ours, theirs, block: int) -> None:
    """Values are equal but for the last bit, and what the cancellation of sums leaves of a block's largest.

    Sums are in float32, of values that are exact to 2^-17 where the result has 16 bits.
    """
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    digits = jnp.finfo(ours.dtype).nmant
    a, b = np.asarray(ours).astype(np.float64), np.asarray(theirs).astype(np.float64)
    # The own chunk's Inf comes back from jnp's rotations in its own place, among NaN; kernels have NaN there as well.
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
    assert np.isnan(a[np.isnan(b)]).all()
    same = (a == b) | ~np.isfinite(b)
    sums = 2.0**-18 if digits > 20 else 2.0**-15
    padded = np.pad(np.where(np.isfinite(b), np.abs(b), 0), (0, -b.size % block)).reshape(-1, block)
    largest = np.repeat(padded.max(1), block)[: b.size]
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(a - b) - 2.0**-digits * np.abs(b))
    assert (error <= sums * largest).all(), error.max()
    if digits < 20 and a.size >= 1000:
        assert (~same).mean() < 0.05


def check_wide_sum(codec: Codec, geometry, dtype: str, **options) -> None:
    """A sum in float32 of 16-bit values, which kernels round nowhere before it, against jnp's."""
    from pallas_kernels import mosaic

    x = values(geometry.elements, "mixed", codec.block, dtype)
    _, wires = reference(codec, geometry, dtype, "decode", x)

    @jax.jit
    def ours(wires, x):
        fmt = dispatch.to_format(codec, encodes=False)
        return mosaic.reduce_decode(fmt, geometry, wires, x, jnp.int32(1), dtype=jnp.dtype("float32"), **options)

    theirs = jax.jit(lambda w, x: dispatch.reduce_decode(codec, geometry, w, x, 1, dtype="float32", backend="jnp"))
    with jax.default_device(jax.devices("cpu")[0]):
        expected = np.asarray(theirs(wires, x))
    assert expected.dtype == np.float32
    check_values(np.asarray(ours(wires, x)), expected, codec.block)
