"""The site table: its rows are what the compiled program sends, call by call."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from helpers import make_mesh
from hlo import collectives
from jax import lax
from jax.sharding import PartitionSpec as P
from shards import per_rank

import taco_jax
from taco_jax import CODECS
from taco_jax.collectives import comm_log

OPERATIONS = {
    "psum": lambda x, **kw: spelled_out.psum(x, "tp", **kw),
    "psum_one_shot": lambda x, **kw: spelled_out.psum(x, "tp", algorithm="one_shot", **kw),
    "psum_scatter": lambda x, **kw: spelled_out.psum_scatter(x, "tp", tiled=True, **kw),
    "all_gather": lambda x, **kw: spelled_out.all_gather(x, "tp", tiled=True, **kw),
    "all_to_all": lambda x, **kw: spelled_out.all_to_all(x, "tp", 0, 1, tiled=True, **kw),
    "ppermute": lambda x, **kw: spelled_out.ppermute(x, "tp", [(0, 1), (1, 2)], **kw),
}


def record(program, *args):
    """(rows, collectives of the compiled program)"""
    with comm_log.record() as table:
        lowered = program.lower(*args)
    return table, collectives(lowered.compile())


def gradient(f):
    def loss(x):
        y = f(x)
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss)


# Exact messages that move values have one rule; exact sums know no algorithm.
EXACT = ("psum", "psum_scatter", "all_gather", "ppermute")


@pytest.mark.parametrize(
    "name,codec",
    [
        *((name, "int8h") for name in OPERATIONS),
        *((name, "none") for name in EXACT),
        *(pytest.param(name, "none", marks=pytest.mark.slow) for name in OPERATIONS if name not in EXACT),
    ],
)
def test_rows_are_the_compiled_collectives_of_both_directions(name, codec):
    x_P = np.random.default_rng(0).normal(size=(4, 8, 300)).astype(np.float32)
    f = lambda x: OPERATIONS[name](x, codec=codec, site="layers/here")
    # The values of a loss differ from rank to rank, or are the same everywhere: both can be stacked.
    program = per_rank(lambda x: jax.tree.map(lambda y: y + 0 * x[0, 0], gradient(f)(x)), 4)
    table, found = record(program, x_P)
    rows = table.rows()
    assert sorted(message for row in rows for message in row.hlo) == found
    assert found and {row.site for row in rows} == {"layers/here"} and {row.kind for row in rows} == {"activation"}
    directions = ["forward"] if name.startswith("psum") and name != "psum_scatter" else ["backward", "forward"]
    assert sorted(row.direction for row in rows) == directions
    for row in rows:
        assert row.codec == codec and row.ranks == 4 and row.axis == ("tp",) and row.calls == 1
        assert row.dtype == "float32"
        # What a device sends: all but its own part of a gathered or exchanged buffer; a ring's share of exact ones.
        ring = {"all-reduce": 2 * 3 / 4, "reduce-scatter": 3, "collective-permute": 1}
        size = {"uint8": 1, "float32": 4}
        sent = sum(n * size[dtype] * ring.get(opcode, 3 / 4) for opcode, dtype, n in row.hlo)
        assert row.bytes == pytest.approx(sent)
        ring = {"psum": 2 * 3 / 4, "ppermute": 1}.get(row.op, 3 / 4)
        assert row.bytes_bf16 == pytest.approx(ring * 2 * row.elements)
    forward = next(row for row in rows if row.direction == "forward")
    assert forward.elements == x_P[0].size * (4 if name == "all_gather" else 1)


def test_bits_per_element_are_the_codecs():
    x_P = np.zeros((4, 1 << 19), np.float32)
    for codec in ("taco", "int4h", "mxfp6"):
        with comm_log.record() as table:
            per_rank(lambda x, c=codec: taco_jax.psum(x, "tp", compression=c), 4, invarying_out=True).lower(x_P)
        (row,) = table.rows()
        assert row.bits_per_element == pytest.approx(CODECS[codec].bits, rel=0.02)
        sent, bf16 = table.total()
        assert (sent, bf16) == (row.bytes, row.bytes_bf16) and bf16 / sent == pytest.approx(
            16 / CODECS[codec].bits, rel=0.02
        )


def test_repeated_bodies_count_their_calls_in_both_directions():
    x_P = np.ones((2, 64), np.float32)

    def body(x):
        with comm_log.repeat(3), comm_log.repeat(2):
            x = taco_jax.psum_scatter(jnp.tile(x, 2), "tp", tiled=True, compression="int8h", site="in")
        return taco_jax.ppermute(x, "tp", [(0, 1)], compression="int8h", site="out")

    table, _ = record(per_rank(gradient(body), 2), x_P)
    calls = {(row.site, row.direction): row.calls for row in table.rows()}
    assert calls == {(s, d): n for s, n in (("in", 6), ("out", 1)) for d in ("forward", "backward")}
    for row in table.rows():
        assert row.bytes == row.calls * sum(n * (0.5 if row.site == "in" else 1) for _, _, n in row.hlo)
    assert comm_log.current_calls() == 1


def test_a_second_trace_is_the_same_row():
    x_P = np.ones((2, 64), np.float32)

    def f(x):
        layer = jax.checkpoint(
            lambda x: jnp.tanh(taco_jax.psum_scatter(jnp.tile(x, 2), "tp", tiled=True, compression="int8h"))
        )
        return lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]

    table, _ = record(per_rank(gradient(f), 2), x_P)
    assert sorted(row.direction for row in table.rows()) == ["backward", "forward"]


def test_other_collectives_are_listed_by_name():
    x_P = np.ones((4, 8), np.float32)

    def f(x):
        comm_log.exact("head/max", "forward", "pmax", "tp", x)
        m = lax.pmax(x, "tp")
        return m + taco_jax.psum(jnp.ones((), jnp.int32), "tp", compression="taco", site="count")

    table, found = record(per_rank(f, 4, invarying_out=True), x_P)
    rows = {row.site: row for row in table.rows()}
    assert rows["head/max"].hlo == (("all-reduce", "float32", 8),) and rows["head/max"].bytes == 1.5 * 8 * 4
    assert rows["count"].dtype == "int32" and rows["count"].bytes == 1.5 * 4
    assert {row.kind for row in table.rows()} == {"other"}
    assert table.total() == (0, 0) and table.total(None)[0] == 1.5 * 36
    assert [m for m in found if m[1] == "float32"] == [("all-reduce", "float32", 8)]


def test_nothing_is_listed_for_one_rank_or_outside_of_a_record():
    x_P = np.ones((1, 8), np.float32)
    table, _ = record(per_rank(gradient(lambda x: OPERATIONS["all_gather"](x, codec="none")), 1), x_P)
    assert table.rows() == []
    x_P = np.ones((2, 8), np.float32)
    program = per_rank(lambda x: taco_jax.psum(x, "tp", compression="taco"), 2, invarying_out=True)
    with comm_log.record() as table:
        assert comm_log.recording()
    program(x_P)
    assert table.rows() == [] and not comm_log.recording()


def test_records_nest():
    x_P = np.ones((2, 8), np.float32)
    f = lambda: per_rank(lambda x: taco_jax.psum(x, "tp", compression="taco"), 2, invarying_out=True).lower(x_P)
    with comm_log.record() as outer:
        with comm_log.record() as inner:
            f()
    assert len(inner.rows()) == 1 and outer.rows() == []


def test_several_axes_are_one_row():
    x = np.ones((8, 64), np.float32)
    axes = ("dp", "tp")
    f = lambda x: taco_jax.psum(x, axes, compression="int8h")
    f = jax.shard_map(f, mesh=make_mesh(dp=2, tp=4), in_specs=P(axes), out_specs=P())
    table, found = record(jax.jit(f), x)
    (row,) = table.rows()
    assert row.axis == ("dp", "tp") and row.ranks == 8 and sorted(row.hlo) == found


def test_forward_messages_that_are_computed_again_count_twice():
    f = gradient(lambda x: taco_jax.psum_scatter(x, "tp", tiled=True, compression="int8h", site="again"))

    def program(x):
        with comm_log.repeat(5), comm_log.forward_again():
            value, grad = f(x)
        return grad + 0 * value

    table, _ = record(per_rank(program, 4), np.ones((4, 8, 300), np.float32))
    assert {row.direction: row.calls for row in table.rows()} == {"forward": 10, "backward": 5}
    assert comm_log.current_calls("forward") == 1


def test_codecs_by_axis_and_direction():
    """Every axis is named, exact sums of gradients too; scalars are not."""
    table = comm_log.Table()
    row = comm_log.Row("a", "forward", "psum", ("tp",), 2, 100, "float32", "none", "activation", 1, 8.0, 10.0, ())
    assert table.codecs() == "none, for nothing is sent" and table.by_axis() == {}
    inside, between = comm_log.Level("inside", 2, "int8h", 1.0), comm_log.Level("between", 2, "int4h", 1.0)
    for changes in (
        {"axis": ("dp",), "site": "dp/grads", "kind": "other", "direction": "backward"},
        {},
        {"site": "b", "codec": "taco", "bytes_bf16": 30.0},
        {"site": "norm", "kind": "other"},
        {"direction": "backward", "codec": "int8h", "levels": (inside, between)},
        {"axis": ("pp",), "codec": "int8_token"},
        {"axis": ("dp", "tp"), "site": "loss", "kind": "other"},
        {"axis": ("dp",), "codec": "int4h", "site": "dp/params/0", "kind": "parameter"},
    ):
        table.add(dataclasses.replace(row, **changes))
    assert table.codecs() == (
        "tp taco (75%) + none (25%) forward, int8h (50%) + int4h (50%) backward; pp int8_token forward; "
        "dp none gradients, int4h weights"
    )
    assert {axis: len(rows) for axis, rows in table.by_axis().items()} == {"tp": 4, "pp": 1, "dp": 2, "several": 1}
