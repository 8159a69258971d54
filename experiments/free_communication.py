"""The trainer without the messages between tensor-parallel ranks: the ceiling of what compression can reach.

    python experiments/free_communication.py --config experiments/qwen7b.py --compression.forward none \
        --compression.backward none

Takes the trainer's flags. The program is the exact one, but every message that a codec could have made smaller, all
rows "activation" of the trainer's table, is made up of this rank's own values: a sum is its own term, a gathered array
repeats its own part. The same matmuls, memory and schedule, and no waiting. The losses it prints mean nothing.
Of the embedding, whose rows another rank may hold, each rank looks up rows of its own instead: products of zeros take
less power, so that a GPU at its limit of power would multiply faster than it can.
(`link_study.py` runs it for the codec name "free", and `bench_step.py` compiles it.)
"""

from __future__ import annotations

import contextlib
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import vjp
from taco_jax.config import cli
from taco_jax.nn import vocab_parallel
from taco_jax.train import loop

# A scope of names tells the lowering rules which collectives are messages. A size could not: with --chains a message is
# as small as other sums are without.
SCOPE = "a_message_that_is_free"


def own_term(x, **_):
    return x


def own_part(x, *, scatter_dimension: int, axis_size: int, tiled: bool, **_):
    if tiled:
        return lax.slice_in_dim(x, 0, x.shape[scatter_dimension] // axis_size, axis=scatter_dimension)
    return lax.index_in_dim(x, 0, scatter_dimension, keepdims=False)


def repeated(x, *, all_gather_dimension: int, axis_size: int, tiled: bool, **_):
    return (jnp.concatenate if tiled else jnp.stack)([x] * axis_size, axis=all_gather_dimension)


FREE = {"psum": own_term, "psum_scatter": own_part, "all_gather": repeated}


class _MarkedLax:
    """jax.lax for the module that sends messages: its collectives carry SCOPE."""

    def __getattr__(self, name: str):
        function = getattr(lax, name)
        return jax.named_scope(SCOPE)(function) if name in FREE else function


def primitive_of(name: str):
    """The primitive behind a collective of jax.lax in a shard_map that checks varying axes."""
    mesh = jax.sharding.AbstractMesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P() if name == "psum" else P("tp")
    body = jax.shard_map(lambda x: getattr(lax, name)(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=spec)
    (outer,) = jax.make_jaxpr(body)(np.zeros((1, 1), np.float32)).eqns
    (inner,) = outer.params["jaxpr"].eqns
    return inner.primitive


@contextlib.contextmanager
def messages_left_out():
    """Exact messages of taco_jax that are traced and lowered inside of it compile to what the rank has itself."""
    _teach_lowering()
    before = vjp.lax, vocab_parallel.embed
    vjp.lax, vocab_parallel.embed = _MarkedLax(), no_zero_rows(vocab_parallel.embed)
    try:
        yield
    finally:
        vjp.lax, vocab_parallel.embed = before


def no_zero_rows(embed):
    """Returns `embed`, whose result has rows of this rank's where another one holds the token's. They get no gradient,
    as on a rank that does not hold them."""

    def embed_without_zeros(table_VD, tokens_BL, axis, *scaling, vocab_size, **options):
        rows, ranks = table_VD.shape[0], lax.axis_size(axis)
        first = lax.axis_index(axis) * rows
        held = jnp.clip(vocab_size - first, 1, rows)
        is_own_BL = (first <= tokens_BL) & (tokens_BL < first + rows)
        # Past the table's end is zero, for tokens whose row is there already.
        stand_ins_BL = jnp.where(is_own_BL, rows * ranks, first + tokens_BL % held)
        x_BLD = embed(table_VD, tokens_BL, axis, *scaling, vocab_size=vocab_size, **options)
        return x_BLD + embed(lax.stop_gradient(table_VD), stand_ins_BL, axis, *scaling, **options)

    return embed_without_zeros


@functools.cache
def _teach_lowering() -> None:
    for name, free in FREE.items():
        primitive = primitive_of(name)
        # A rule of one platform goes before the one for all.
        rules = {None: mlir._lowerings[primitive]}
        rules |= {p: of[primitive] for p, of in mlir._platform_specific_lowerings.items() if primitive in of}
        for platform, rule in rules.items():
            rule = _rule(getattr(rule, "rule", rule), mlir.lower_fun(free, multiple_results=False))
            # What is cached does not know the scope.
            mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)


def _rule(sent, free):
    def rule(context, *operands, **parameters):
        return (free if SCOPE in str(context.name_stack) else sent)(context, *operands, **parameters)

    return rule


def main(args) -> int:
    # Gradients of sums that are not there need not be finite, and the steps count all the same.
    with messages_left_out():
        return loop.main([*args, "--max-skipped-in-a-row", str(10**9)])


if __name__ == "__main__":
    sys.exit(cli.run(main))
