"""Sums of slices of sums, and equal collectives: one message in the place of several.

`UNFUSED` shows the hook on CPU what it gets on CUDA: collectives and slices that stand alone.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from dropin_programs import UNFUSED, check_close, check_equal, fresh, mesh, run, sharded
from hlo import counts
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.dropin import DropInError, share_collectives
from taco_jax.dropin.hlo_module import Module

ROWS, COLUMNS = 32, 512
PART = COLUMNS // 4


def each(f, on, outs=1):
    """jit of a function that every device runs on its own rows, with `outs` results of its own."""
    every = P(on.axis_names)
    specs = (every,) * outs if outs > 1 else every
    return jax.jit(
        fresh(jax.shard_map(f, mesh=on, in_specs=every, out_specs=specs, check_vma=False)), compiler_options=UNFUSED
    )


def rows(on, columns=COLUMNS):
    return sharded(on, jax.random.normal(jax.random.key(4), (ROWS * on.size, columns)), on.axis_names)


def part(y, start):
    return lax.dynamic_slice_in_dim(lax.psum(y, "b"), start * PART, PART, 1)


def own(y):
    return part(y, lax.axis_index("b"))


def scattered(y, dim):
    return lax.psum_scatter(y, "b", scatter_dimension=dim, tiled=True)


# Each with the operations of the messages that it sends under the hook.
SUMS = {
    "own parts": (
        lambda x: own(x) + (x[:, :PART] + own(jnp.sin(x))) * 2 + x[:, :PART] + own(x * x), 2 * ["reduce_scatter"]
    ),
    "the same part of all": (lambda x: part(x, 1) + part(jnp.sin(x), 1), ["all_reduce"]),
    "other parts": (
        lambda x: own(x) + part(jnp.sin(x), 3 - lax.axis_index("b")), ["all_reduce", "reduce_scatter"]
    ),
    "reduce-scatters": (
        lambda x: (scattered(x[:, :PART], 1) + scattered(jnp.sin(x[:, :PART]), 1)
                   + scattered(jnp.cos(x[:, :PART]), 0).reshape(ROWS, -1)), 2 * ["reduce_scatter"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_parts_of_sums(name):
    f, operations = SUMS[name]
    on = mesh(b=4)
    x = rows(on)
    g = each(f, on)
    compiled, ours, found = run(g, (x,), {"b": "int8h"})
    assert sorted(s.operation for s in found) == operations and all(s.compressed for s in found)
    check_close(g(x), ours, 0.015)


def test_a_sum_of_parts_that_one_operation_of_the_plan_names():
    """The plan's line is that of what the sums become. Sums of two lines stay two messages."""
    on = mesh(b=4)
    x = rows(on)
    f = each(lambda x: (own(x) + own(jnp.sin(x)), lax.psum(x, "b") + lax.psum(jnp.cos(x), "b")), on, 2)
    _, ours, found = run(f, (x,), {"b": {"reduce_scatter": "int8h"}})
    assert sorted((s.operation, s.compressed) for s in found) == [
        ("all_reduce", False), ("all_reduce", False), ("reduce_scatter", True)
    ]  # fmt: skip
    check_equal(f(x)[1], ours[1])
    check_close(f(x)[0], ours[0], 0.015)


# Equal collectives. XLA's partitioner writes several where one array is wanted under shardings that differ in nothing.

SPECS = ((P.UNCONSTRAINED, None), (None, None), ("a", None))


def gathered(on, y, n=0):
    constrained = lambda y, spec: lax.with_sharding_constraint(y, NamedSharding(on, P(*spec)))
    return constrained(constrained(y, (None, "b")), SPECS[n])


def program(f, **axes):
    """(jit of f with a mesh as its first argument, its arguments): an array and weights, both cut over b."""
    on = mesh(a=1, b=4, **axes)
    x, w = (jax.random.normal(jax.random.key(n), (n * 64, 512)) for n in (2, 8))
    f = jax.jit(fresh(functools.partial(f, on)), compiler_options=UNFUSED)
    return f, (sharded(on, x, None, "b"), sharded(on, w / 16, None, "b"))


def three(on, x, w):
    y = jnp.sin(x)
    return gathered(on, y) @ w, jnp.cos(gathered(on, y, 1)) @ w, gathered(on, y, 2) * 3


def test_equal_collectives_are_one_message():
    f, args = program(three)
    assert counts(f.lower(*args).compile()) == {"all-gather": 3}
    compiled, ours, (site,) = run(f, args, {"b": "int8h"})
    assert counts(compiled) == {"all-gather": 1} and site.compressed
    check_close(f(*args), ours, 0.01)


def test_what_waits_stays_where_it_is():
    """Without reading another instruction, and so does that one."""
    f, args = program(three)
    modules = f.lower(*args).compile().runtime_executable().hlo_modules()
    module = Module(modules[0].as_serialized_hlo_module_proto())
    sends = [i for i in module.entry.proto.instructions if i.opcode == "all-gather"]
    sends[2].control_predecessor_ids.append(sends[0].id)
    assert share_collectives.share(module, lambda c: 0, 4, []) == 0
    del sends[2].control_predecessor_ids[:]
    assert share_collectives.share(module, lambda c: 0, 4, []) == 2


def test_collectives_that_differ_are_not_shared():
    """In what they send, in the line of the plan, or in nothing but what comes before them."""

    def four(on, x, w):
        y = jnp.sin(x)
        with jax.named_scope("other"):
            other = jnp.cos(gathered(on, y, 1)) @ w
        return gathered(on, y) @ w, other, jnp.cos(gathered(on, jnp.cos(x))) @ w

    f, args = program(four)
    _, ours, found = run(f, args, {"b": {"*/other/*": "int4h", "*": "int8h"}})
    assert sorted(s.codec for s in found) == ["int4h", "int8h", "int8h"]
    check_close(f(*args), ours, 0.1)


def test_what_would_be_kept_for_long_is_sent_anew():
    """Gathers of the program's arguments, and one each for the forward and the backward pass."""

    def f(on, x, w):
        @jax.custom_vjp
        def g(y):
            return jnp.cos(gathered(on, y)).sum()

        g.defvjp(lambda y: (g(y), y), lambda y, t: (t * jnp.tanh(gathered(on, y, 1)),))
        return jax.value_and_grad(lambda x: g(jnp.sin(x)))(x), gathered(on, w) * 2, jnp.cos(gathered(on, w, 1))

    f, args = program(f)
    assert counts(f.lower(*args).compile())["all-gather"] == 4
    _, ours, found = run(f, args, {"b": {"all_gather": "int8h"}})
    assert [s.operation for s in found if s.compressed] == 4 * ["all_gather"]
    check_close(f(*args), ours, 0.05)


def test_a_codec_with_a_scale_for_each_token_keeps_its_tokens():
    on = mesh(b=4)
    f, x = each(own, on), rows(on)
    with pytest.raises(DropInError, match="codec 'int8_token' has one scale a token, and the tokens' own dim is cut"):
        run(f, (x,), {"b": "int8_token"})
