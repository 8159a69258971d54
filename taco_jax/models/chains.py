"""Chains: parts of the local batch that go through each layer side by side.

What one chain sends depends on nothing that another computes at that time, so XLA's latency-hiding scheduler runs one
chain's messages beside another's matrix products. Messages and products are smaller and more; the same bytes travel.

With two chains, attention A and mlp M, and the sums over the ranks below the products beside which they travel:

    product   A0    A1    M0    M1         |   A0 of the next layer
    message         A0    A1    M0    M1   |

The last message of a layer has nothing beside it: a loop's body ends with it. With n chains that is one of 2n. A
message in two hops shares its products among them, and today's XLA leaves most first hops without. In the backward
pass there are products of weight gradients and of remat for all.

Dims: B batch, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from taco_jax.collectives.differentiable import OUTPUT_NAME
from taco_jax.compat import barrier
from taco_jax.scales import SiteScales, fork

Half = Callable[[jax.Array, Any, dict[str, SiteScales | None]], tuple[jax.Array, Callable[[jax.Array], jax.Array]]]
"""(x_BLD, a layer's parameters, its site scales) -> (this rank's term, the function that adds up the ranks' terms)."""


def count(batch: int, chains: int) -> int:
    """How many chains a batch makes: the largest divisor of `batch` that is at most `chains`.

    The trainer's microbatches make exactly what is configured; one sequence, as in sampling, is one chain.
    """
    return next(n for n in range(min(batch, chains), 0, -1) if batch % n == 0)


def split(x_BLD: jax.Array, n: int) -> tuple[jax.Array, ...]:
    return (x_BLD,) if n == 1 else tuple(jnp.split(x_BLD, n))


def join(xs: tuple[jax.Array, ...]) -> jax.Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs)


def side_by_side(*halves: Half) -> Callable:
    """The layer `x += sum over ranks of half(x)`, one half after the other, for a tuple of chains.

    Each chain is a use of its own of every site.
    """

    def layer(xs, params: Any, state: dict[str, SiteScales | None]):
        xs = list(xs)
        forked = {site: fork(scales, len(xs)) for site, scales in state.items()}
        states = [{site: uses[i] for site, uses in forked.items()} for i in range(len(xs))]
        sent = None  # (its chain, the sum) that no product has waited for
        for half in halves:
            for i, state in enumerate(states):
                if sent and sent[0] == i:
                    xs[i] += sent[1]
                    sent = None
                y_BLD, add_up = half(xs[i], params, state)
                if sent:
                    y_BLD, sum_BLD = _in_turn(y_BLD, sent[1])
                    xs[sent[0]] += checkpoint_name(sum_BLD, OUTPUT_NAME)
                sent = i, add_up(y_BLD)
        xs[sent[0]] += sent[1]
        return tuple(xs)

    return layer


@jax.custom_vjp
def _in_turn(y, arrived):
    """(a chain's term, the sum of the chain before it), which whatever uses one of them waits for.

    So messages go one by one, each beside the next chain's product. Without it XLA has them go in lockstep, with
    nothing beside them, or makes one message of two. Both results must be used: XLA forgets the others.
    """
    return barrier(y, arrived)


_in_turn.defvjp(lambda y, arrived: (_in_turn(y, arrived), None), lambda _, cts: cts)
