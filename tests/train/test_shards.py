"""Shares of leaves: where a leaf is cut, and that its pieces come back."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from shards import per_rank

from taco_jax.collectives.transport import pack, unpack
from taco_jax.train.shards import buckets, cut

SIZES = {"dp": 4, "pp": 2, "tp": 2}


@pytest.mark.parametrize(
    "shape, spec, ranks, dim, share_shape, share_spec",
    [
        # The first dim that divides, by the size of a device's part.
        ((8, 6, 4), P(), 4, 0, (2, 6, 4), P("dp", None, None)),
        ((3, 8, 4), P(None, None, "tp"), 4, 1, (3, 2, 2), P(None, "dp", "tp")),
        ((3, 5, 16), P(None, None, "tp"), 4, 2, (3, 5, 2), P(None, None, ("tp", "dp"))),
        ((6, 10, 16), P("pp", None, "tp"), 4, 2, (3, 10, 2), P("pp", None, ("tp", "dp"))),
        # None divides: the one that needs the least padding.
        ((3, 5), P(), 2, 1, (3, 3), P(None, "dp")),
        ((6, 10), P("pp", "tp"), 4, 0, (1, 5), P(("pp", "dp"), "tp")),
        ((3,), P(), 8, 0, (1,), P("dp")),
    ],
)
def test_where_a_leaf_is_cut(shape, spec, ranks, dim, share_shape, share_spec):
    c = cut(shape, spec, SIZES, ranks)
    assert (c.dim, c.share_shape, c.share_spec()) == (dim, share_shape, share_spec)
    assert c.share_spec(("a", "b"))[dim] == tuple(
        name for entry in (share_spec[dim],) for axis in ((entry,) if isinstance(entry, str) else entry)
        for name in (("a", "b") if axis == "dp" else (axis,))
    )  # fmt: skip


@pytest.mark.parametrize("shape, ranks", [((8, 6), 4), ((3, 5, 4), 4), ((3, 5), 2), ((3,), 8), ((7, 5, 3), 8)])
def test_rows_are_the_shares_and_join_is_their_inverse(shape, ranks):
    c, x = cut(shape, P(), SIZES, ranks), np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rows = c.rows(x)
    np.testing.assert_array_equal(c.join(rows), x)
    assert rows.size == ranks * np.prod(c.share_shape) == x.size + c.padding * x.size // shape[c.dim]
    own = per_rank(lambda x: (c.own(x, "tp"), c.without_padding(c.own(x, "tp") + 1, "tp")), ranks)
    shares, marked = own(np.broadcast_to(x, (ranks, *shape)))
    np.testing.assert_array_equal(shares.reshape(ranks, -1), rows)
    # Ones everywhere but in the padding.
    np.testing.assert_array_equal(c.join((marked - shares).reshape(ranks, -1)), np.ones(shape))
    assert np.sum(marked - shares > 0.5) == x.size


def test_no_block_has_elements_of_two_leaves():
    parts = [np.arange(5.0), np.arange(8.0), np.arange(1.0)]
    packed = pack(parts, 4)
    np.testing.assert_array_equal(packed, [0, 1, 2, 3, 4, 0, 0, 0, *range(8), 0, 0, 0, 0])
    for part, back in zip(parts, unpack(packed, [5, 8, 1], 4), strict=True):
        np.testing.assert_array_equal(part, back)
    rows = [np.ones((2, 3)), np.zeros((2, 2))]
    assert pack(rows, 1).shape == (2, 5) and pack(rows, 4).shape == (2, 8)
    assert jax.tree.map(np.shape, unpack(pack(rows, 4), [3, 2], 4)) == [(2, 3), (2, 2)]


def test_buckets_are_filled_in_order_within_their_group():
    assert buckets([4, 9, 3, 30, 2, 1], ["a", "b", "a", "a", "a", "b"], 10) == [[0, 2], [3], [4], [1, 5]]
    assert buckets([], [], 10) == []
