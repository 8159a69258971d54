"""The messages over dp, on a small tree: sums, shares, copies that follow their masters, and what is listed of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from hlo import collectives
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from model_helpers import compare_replicas

from taco_jax.collectives import comm_log
from taco_jax.config import DataParallelConfig, MeshConfig, TrainConfig
from taco_jax.train.data_parallel import DataParallel

# No dim of the norms divides; ranks along tp have parts of the others.
SHAPES = {
    "embed": (40, 24), "head": (24, 40), "norm": (15,),
    "layers": {"bias": (3, 20), "kernel": (3, 24, 40), "norm": (3, 5)},
}  # fmt: skip
SPECS = {
    "embed": P("tp", None), "head": P(None, "tp"), "norm": P(),
    "layers": {"bias": P(None, "tp"), "kernel": P(None, None, "tp"), "norm": P()},
}  # fmt: skip
IS_SHAPE = lambda node: isinstance(node, tuple)


def over(dp=4, tp=2, compute_dtype="float32", devices_per_host=None, **settings) -> DataParallel:
    mesh, data_parallel = MeshConfig(devices_per_host=devices_per_host), {"gradients": "none"} | settings
    config = TrainConfig(mesh=mesh, data_parallel=DataParallelConfig(**data_parallel), compute_dtype=compute_dtype)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=IS_SHAPE)
    return DataParallel(config, make_mesh(dp=dp, tp=tp), SPECS, shapes)


def tree(lead=(), seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    make = lambda s: scale * rng.normal(size=(*lead, *s)).astype(np.float32)
    return jax.tree.map(make, SHAPES, is_leaf=IS_SHAPE)


def put(dp, values, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(dp.mesh, spec)), values, specs)


@functools.cache
def jitted(dp, name):
    """jit of a method: one program however often it is called."""
    return jax.jit(getattr(dp, name))


def whole(dp, values):
    return jitted(dp, "whole")(values) if dp.sharded else values


def errors(got, want):
    """Relative error of each leaf."""
    return [np.linalg.norm(np.asarray(g) - w) / np.linalg.norm(w) for g, w in zip(*map(jax.tree.leaves, (got, want)))]


def reduced(dp):
    """(what `reduce` gives, the sums, rows of the table, collectives of the compiled program)"""
    partial = tree((dp.ranks,))
    with comm_log.record() as table:
        lowered = jax.jit(dp.reduce).lower(put(dp, partial, dp.partial_specs))
    compiled = lowered.compile()
    got = compiled(put(dp, partial, dp.partial_specs))
    return got, jax.tree.map(lambda x: np.float64(x).sum(0).astype(np.float32), partial), table.rows(), compiled


SLOW = pytest.mark.slow
SUMS = [
    (3, 1, "none", 1e-6, True, dict(bucket_mb=0.001)),
    (2, 2, "int8h", 0.012, False, dict(bucket_mb=0.004)),
    (4, 2, "sdp4", 0.13, False, dict(devices_per_host=4)),
    (4, 2, "sdp4", 0.13, True, dict(devices_per_host=4)),
    *(
        pytest.param(*case[:4], zero1, case[4], marks=SLOW)
        for zero1 in (False, True)
        for case in [
            (2, 2, "none", 1e-6, {}),
            (2, 2, "int8h", 0.012, {}),
            (4, 1, "sdp4", 0.012, {}),
            (8, 1, "none", 1e-6, {}),
            (3, 2, "mxfp8", 0.06, {}),
            (8, 1, "int4h", 0.2, {}),
            (8, 1, "sdp4", 0.2, dict(devices_per_host=1)),
            (6, 1, "sdp4", 0.13, dict(devices_per_host=3, bucket_mb=0.004)),
            (8, 1, "sdp4", 0.2, dict(devices_per_host=2)),
        ]
    ),
]


@functools.cache
def in_int8h():
    """(DataParallel, what `reduced` gives) of shares, summed in buckets of any size."""
    d = over(4, 2, gradients="int8h", zero1=True)
    return d, reduced(d)


@pytest.mark.parametrize("dp, tp, gradients, most, zero1, settings", SUMS)
def test_sums(dp, tp, gradients, most, zero1, settings):
    d = over(dp, tp, gradients=gradients, zero1=zero1, **settings)
    got, want, rows, compiled = reduced(d)
    largest = max(errors(whole(d, got), want))
    assert largest <= most
    # A codec that had not been used would be exact.
    assert gradients == "none" or largest > most / 20
    if zero1:
        for leaf, cut, spec in zip(*map(jax.tree.leaves, (got, d.cuts, d.share_specs))):
            assert leaf.addressable_shards[0].data.shape == cut.share_shape
            assert leaf.sharding.is_equivalent_to(NamedSharding(d.mesh, spec), leaf.ndim)
    else:
        assert compare_replicas(got)
    # What is listed is what is sent, and all of it.
    listed = sorted(message for row in rows for message in row.hlo)
    if gradients == "none" and not zero1:
        assert {op for op, _, _ in collectives(compiled)} == {"all-reduce"}
        assert sum(n for _, _, n in collectives(compiled)) == sum(n for _, _, n in listed)
    else:
        assert collectives(compiled) == listed
        assert all(row.kind == "gradient" and row.direction == "backward" for row in rows)
    assert {dtype for _, dtype, _ in listed} == {"float32" if gradients == "none" else "uint8"}


def test_the_bytes_of_a_bucket():
    """One bucket for each kind of leaf; each leaf of a share from a whole block on."""
    d, (*_, rows, _) = in_int8h()
    codec = d.gradients.codecs[0]
    padded = lambda *shapes: sum(-(-int(np.prod(s)) // 128) * 128 for s in shapes)
    shares = [c.share_shape for c in jax.tree.leaves(d.cuts)]
    embed, head, bias, kernel, norms, norm = shares
    expected = {padded(embed, bias, kernel), padded(head), padded(norms, norm)}
    assert {row.elements // 4 for row in rows} == expected and len(rows) == 3
    for row in rows:
        assert row.bytes == 3 / 4 * 4 * codec.wire_bytes(row.elements // 4) and row.codec == "int8h"


def test_large_leaves_go_in_chunks_and_the_values_are_the_same():
    _, (got, _, rows, _) = in_int8h()
    chunked, _, small, _ = reduced(over(4, 2, gradients="int8h", zero1=True, bucket_mb=0.004))
    assert len(small) > len(rows) and max(len(row.hlo) for row in small) > 1 == max(len(row.hlo) for row in rows)
    for a, b in zip(*map(jax.tree.leaves, (got, chunked))):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_value_that_is_not_finite_reaches_every_rank():
    d, (*_, compiled) = in_int8h()
    partial = tree((4,))
    partial["layers"]["kernel"][2, 1, 3, 5] = np.inf
    got = compiled(put(d, partial, d.partial_specs))
    assert not np.isfinite(np.asarray(got["layers"]["kernel"]).sum())
    assert np.isfinite(np.asarray(got["embed"]).sum())


@pytest.mark.parametrize("ranks", [8, 4])
def test_padding_of_shares_stays_zero(ranks):
    """Of 4 ranks the last one has three values of `norm` and padding in one block: noise of a rotated block of fewer
    values stays among them."""
    got, *_ = reduced(over(ranks, 1, gradients="int4h", zero1=True))
    for leaf, shape in ((got["norm"], SHAPES["norm"]), (got["layers"]["norm"], SHAPES["layers"]["norm"])):
        leaf = np.asarray(leaf)
        own = np.zeros(leaf.shape, bool)
        own[tuple(slice(n) for n in shape)] = True
        assert not own.all() and (leaf[own] != 0).all() and (leaf[~own] == 0).all()


@pytest.mark.parametrize(
    "parameters, compute_dtype, dtypes",
    [
        pytest.param("none", "bfloat16", {"float32"}, marks=SLOW),
        ("bfloat16", "float32", {"uint16"}),
        pytest.param("int8h", "float32", {"uint8"}, marks=SLOW),
        ("int4h", "bfloat16", {"uint8"}),
    ],
)
def test_copies_follow_their_masters(parameters, compute_dtype, dtypes):
    """However many steps: what a message loses is in the next difference."""
    d = over(4, 2, compute_dtype, zero1=True, parameters=parameters, bucket_mb=0.01)
    start = put(d, tree(), d.specs)
    masters = jitted(d, "own")(start)
    copy = jax.tree.map(lambda x: x.astype(d.copy_dtype), start) if d.has_copy else None
    with comm_log.record() as table:
        lowered = jax.jit(d.spread).lower(masters, copy)
    compiled = lowered.compile()
    assert collectives(compiled) == sorted(h for row in table.rows() for h in row.hlo)
    assert {dtype for row in table.rows() for _, dtype, _ in row.hlo} == dtypes
    assert {(row.kind, row.direction, row.axis) for row in table.rows()} == {("parameter", "forward", ("dp",))}
    move = jax.jit(lambda m, s: jax.tree.map(jnp.add, m, s))
    for step in range(12):
        masters = move(masters, jitted(d, "own")(put(d, tree(seed=step + 1, scale=0.01), d.specs)))
        params, copy = compiled(masters, copy)
        used, expected = copy if d.has_copy else params, jax.tree.map(np.asarray, whole(d, masters))
        assert compare_replicas(used)
        if parameters in ("none", "bfloat16"):
            for a, b in zip(*map(jax.tree.leaves, (used, expected))):
                np.testing.assert_array_equal(a, b.astype(a.dtype))
        else:
            # Of a step of 0.01: 1/127 or 1/7 of the block's maximum, and half a unit of the copy's own type.
            step_error = {"int8h": 2.5e-4, "int4h": 4e-3}[parameters]
            ulp = 2**-8 if compute_dtype == "bfloat16" else 2**-23
            for a, b in zip(*map(jax.tree.leaves, (used, expected))):
                assert np.sqrt(np.mean((np.float32(a) - b) ** 2)) <= step_error + ulp
    assert (copy is None) == (parameters == "none")


def test_one_rank_sends_nothing():
    d = over(1, 2, gradients="int8h", zero1=True, parameters="int8h")
    assert not d.sharded and not d.has_copy and d.codecs == []
    got, want, rows, _ = reduced(d)
    assert rows == [] and max(errors(got, want)) == 0
    assert jax.jit(d.spread)(got, None)[1] is None


def test_settings_of_codecs():
    assert over(gradients="sdp4", devices_per_host=4, zero1=True, parameters="int6h").codecs == [
        "int4h", "int6h", "int8h",
    ]  # fmt: skip
    assert over(zero1=True, parameters="bfloat16").codecs == over().codecs == []
    assert dataclasses.asdict(DataParallelConfig()) == {
        "gradients": None, "zero1": False, "parameters": "none", "bucket_mb": 256.0, "overlap": None,
    }  # fmt: skip
