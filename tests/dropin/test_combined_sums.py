"""Sums of several small arrays as one message: combined by XLA on CPU, and by the hook on CUDA, where XLA comes later.

`UNFUSED` leaves XLA's combining out, so that the hook's is seen on CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropin_programs import UNFUSED, check_close, check_equal, fresh, mesh, run, sharded
from hlo import counts, groups
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.dropin import combine_sums

ROWS, COLUMNS = 32, 256
SIZE = ROWS * COLUMNS
ONE_MESSAGE = {"all-to-all": 1, "all-gather": 1}


def each(f, on, outs, options=UNFUSED):
    """jit of a function that every device runs on its own rows, with `outs` results of its own."""
    every = P(on.axis_names)
    g = jax.shard_map(f, mesh=on, in_specs=every, out_specs=(every,) * outs, check_vma=False)
    return jax.jit(fresh(g), compiler_options=options)


def rows(on, columns=COLUMNS):
    return sharded(on, jax.random.normal(jax.random.key(4), (ROWS * on.size, columns)), on.axis_names)


def three(x):
    """Sums of sizes that are no whole blocks, each of which something reads before the next is there."""
    y = lax.psum(x[:, :33] * 1e4, "b") * 2
    z = lax.psum(jnp.sin(x)[:20, :250], "b") + 1e-9
    return y, z, lax.psum(x[:, :100] * 1e-4, "b") * 3


@pytest.mark.parametrize("options,before", [(UNFUSED, 3), (None, 1)], ids=["by the hook", "by XLA"])
def test_small_sums_are_one_message_and_none_spoils_another(options, before):
    on = mesh(a=2, b=4)
    x = rows(on)
    f = each(three, on, 3, options)
    assert counts(f.lower(x).compile()) == {"all-reduce": before}
    compiled, ours, found = run(f, (x,), {"b": "int8h"})
    assert counts(compiled) == ONE_MESSAGE
    assert [s.reason for s in found] == [""] * 3
    assert sorted(s.before for s in found) == sorted(n * 4 * 1.5 for n in (32 * 33, 20 * 250, 32 * 100))
    # Large values and small ones have no block in common.
    check_close(f(x), ours, 0.01)


def test_sums_of_gradients_are_one_message():
    on = mesh(data=4)
    keys = jax.random.split(jax.random.key(5), 7)
    ws = [jax.random.normal(key, (64, 64)) / 8 for key in keys[1:]]
    x = sharded(on, jax.random.normal(keys[0], (128, 64)), "data")

    def loss(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    def step(ws, x):
        return [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x))]

    f = jax.jit(fresh(step), compiler_options=UNFUSED)
    assert counts(f.lower(ws, x).compile()) == {"all-reduce": 6}
    compiled, ours, found = run(f, (ws, x), {"data": "int8h"})
    assert counts(compiled) == ONE_MESSAGE and len(found) == 6
    change = lambda new: [n - w for n, w in zip(new, ws)]
    check_close(change(f(ws, x)), change(ours), 0.02)


def test_a_sum_that_needs_another_is_another_message():
    on = mesh(b=4)
    x = rows(on)

    def f(x):
        y = lax.psum(x, "b")
        return y, lax.psum(jnp.sin(y) * x, "b"), lax.psum(jnp.cos(x), "b")

    f = each(f, on, 3)
    compiled, ours, found = run(f, (x,), {"b": "int8h"})
    assert counts(compiled) == dict.fromkeys(ONE_MESSAGE, 2) and len(found) == 3
    check_close(f(x), ours, 0.05)


def test_messages_never_wait_for_each_other():
    """Sums over a and b of which each pair could be one, but not both pairs."""
    on = mesh(a=2, b=4)
    x = rows(on)

    def f(x):
        first = lax.psum(x, "a")
        other = lax.psum(jnp.sin(x), "b")
        return lax.psum(jnp.cos(other) + x, "a"), lax.psum(jnp.cos(first) + x, "b")

    f = each(f, on, 2)
    compiled, ours, found = run(f, (x,), {"a": "int8h", "b": "int8h"})
    assert counts(compiled)["all-gather"] == 3 and len(found) == 4
    check_close(f(x), ours, 0.02)


def test_what_stays_exact_is_left_to_xla():
    on = mesh(b=4)
    x = rows(on)
    f = each(lambda x: (lax.psum(x[:8], "b"), lax.psum(jnp.sin(x[:8]), "b"), lax.psum(x, "b"), lax.pmax(x, "b")), on, 4)
    compiled, ours, found = run(f, (x,), {"b": "int8h"}, min_bytes=x.nbytes // 4)
    exact = [n for op, _, n, _ in groups(compiled) if op == "all-reduce"]
    assert sorted(exact) == [8 * COLUMNS, 8 * COLUMNS, ROWS * COLUMNS]
    assert [s.shape for s in found if s.compressed] == [(ROWS, COLUMNS)]
    check_equal([f(x)[n] for n in (0, 1, 3)], [ours[n] for n in (0, 1, 3)])


LIMITS = [("ALONE_BYTES", 4 * SIZE - 1, 4), ("MESSAGE_BYTES", 12 * SIZE - 1, 2), ("MESSAGE_SUMS", 3, 2)]


@pytest.mark.parametrize("limit,value,messages", LIMITS)
def test_limits_of_a_message(limit, value, messages, monkeypatch):
    monkeypatch.setattr(combine_sums, limit, value)
    on = mesh(b=4)
    x = rows(on)
    f = each(lambda x: tuple(lax.psum(jnp.sin(x * n), "b") for n in range(1, 5)), on, 4)
    compiled, ours, _ = run(f, (x,), {"b": "int8h"})
    assert counts(compiled) == dict.fromkeys(ONE_MESSAGE, messages)
    check_close(f(x), ours, 0.01)


def test_directions_of_two_codecs_are_two_messages():
    on = mesh(a=2, b=4)
    x = rows(on)

    def f(x):
        f = lambda x: (lax.psum(jnp.sin(x), "b") ** 2).sum()
        return (lax.psum(x, "b"), *jax.vjp(f, x)[1](jnp.float32(1)))

    f = each(f, on, 2)
    compiled, ours, found = run(f, (x,), {"b": "int8h:int6h"})
    assert np.isfinite(np.asarray(ours[0])).all()
    assert {(s.direction, s.codec) for s in found} == {("forward", "int8h"), ("backward", "int6h")}
