"""A model in numpy of a product with its all-reduce, and arguments whose products are exact in float32."""

import ml_dtypes
import numpy as np
from reference_codec import REFERENCES
from reference_collectives import model_sum

ROWS, BLOCK = 64, 128


def operands(ranks: int, m: int, k: int, n: int, alike: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """bfloat16 x [ranks, m, k], w [ranks, k, n] of small integers; `alike`: the same for all, every 64 rows."""
    rng = np.random.default_rng(m + k + n)
    x = rng.integers(-2, 3, (1 if alike else ranks, m, k))
    if alike:
        x = np.broadcast_to(x.reshape(m // 256, 4, ROWS, k)[:, :1], (m // 256, 4, ROWS, k)).reshape(1, m, k)
    w = rng.integers(-1, 2, (len(x), k, n))
    shapes = (ranks, m, k), (ranks, k, n)
    return tuple(np.broadcast_to(a, s).astype(ml_dtypes.bfloat16) for a, s in zip((x, w), shapes))


def model(codec: str, x: np.ndarray, w: np.ndarray, exponent=None) -> np.ndarray:
    """The result, bfloat16[m, n]: rank f mod P owns rows 64 f and on."""
    reference, ranks, (m, n) = REFERENCES[codec], len(x), (x.shape[1], w.shape[2])
    terms = np.stack([a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(x, w)])
    terms = terms.astype(ml_dtypes.bfloat16).astype(np.float32)
    y = np.empty((m, n), np.float32)
    for f in range(m // ROWS):
        rows = slice(ROWS * f, ROWS * (f + 1))
        total = model_sum(reference, terms[:, rows], f % ranks, exponent)
        sent = reference.encode_blocks(total, exponent)[1]
        y[rows] = reference.from_blocks(sent, ROWS * n).reshape(ROWS, n)
    return y.astype(ml_dtypes.bfloat16)


def check(codec: str, found, expected: np.ndarray) -> None:
    """Sums of a product and a term are rounded once or twice, by how the compiler meets them: then a value on a border
    falls on its other side, and what is rotated with it moves a little."""
    found, expected = (np.asarray(a).astype(np.float32) for a in (found, expected))
    bad = ~np.isfinite(expected)
    np.testing.assert_array_equal(bad, ~np.isfinite(found))
    found, expected = found[~bad], expected[~bad]
    assert (found != expected).mean() < 0.02
    assert np.linalg.norm(found - expected) <= 2e-3 * np.linalg.norm(expected)
