"""Sums of slices of sums: one message in the place of several.

`UNFUSED` shows the hook on CPU what it gets on CUDA: collectives and slices that stand alone.
"""

import jax
import jax.numpy as jnp
import pytest
from dropin_programs import UNFUSED, check_close, check_equal, fresh, mesh, run, sharded
from jax import lax
from jax.sharding import PartitionSpec as P

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
