"""Layers of halves, and chains: parts of the local batch that go through each layer side by side.

A half is `x += sum over the ranks of last(core(norm(x)))`: a message enters core (its gradient's sum) and leaves last.
What one chain sends depends on nothing that another computes at that time, so it can travel beside the other's matrix
products. Messages and products are smaller and more; the same bytes travel, but for the padding of each message. With
two chains, attention A and mlp M:

    product   A0    A1    M0    M1         |   A0 of the next layer
    message         A0    A1    M0    M1   |

The last message of a layer has nothing beside it: a loop's body ends with it. With n chains that is one of 2n.

Dims: B batch, L length, D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from taco_jax.collectives.vjp import OUTPUT_NAME
from taco_jax.compat import barrier
from taco_jax.compression.site_scales import SiteScales, fork
from taco_jax.models.feedback import Stream
from taco_jax.models.projections import add_bias, add_up, enter, row, row_sum
from taco_jax.models.run_config import Parallel

State = Mapping[str, SiteScales | None]


@dataclasses.dataclass(frozen=True)
class Half:
    """Attention or mlp: norm(x, parameters), core(h, parameters, what all layers share).

    norm_name, name: their parameters in a layer's. out_name: the last product's in `name`'s. enters, leaves: the sites
    of the messages.
    """

    norm: Callable[[jax.Array, Any], jax.Array]
    core: Callable[[jax.Array, Any, Any], jax.Array]
    norm_name: str
    name: str
    out_name: str
    enters: str
    leaves: str


def count(batch: int, chains: int) -> int:
    """How many chains a batch makes: the largest divisor of `batch` that is at most `chains`.

    The trainer's microbatches make exactly what is configured; one sequence, as in sampling, is one chain.
    """
    return next(n for n in range(min(batch, chains), 0, -1) if batch % n == 0)


def split(x_BLD: jax.Array, n: int) -> tuple[jax.Array, ...]:
    return (x_BLD,) if n == 1 else tuple(jnp.split(x_BLD, n))


def join(xs: tuple[jax.Array, ...]) -> jax.Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs)


def one(halves: tuple[Half, ...], par: Parallel) -> Callable:
    """The layer for a whole batch, with the error that its sums carry along."""

    def layer(stream: Stream, params: Any, state: State, shared: Any) -> Stream:
        x_BLD, error_BLD = stream
        for half in halves:
            out = params[half.name][half.out_name]
            h_BLD = enter(half.norm(x_BLD, params[half.norm_name]), par, state, half.enters)
            u_BLF = half.core(h_BLD, params[half.name], shared)
            sum_BLD, error_BLD = row_sum(u_BLF, out["kernel"], error_BLD, par, state=state, site=half.leaves)
            x_BLD += add_bias(sum_BLD, out)
        return Stream(x_BLD, error_BLD)

    return layer


def side_by_side(halves: tuple[Half, ...], par: Parallel) -> Callable:
    """The layer, one half after the other, for a tuple of chains; each chain is a use of its own of every site.

    XLA chooses what it puts beside a message. (`schedule` leaves it less choice, but knows no sequence parallelism.)
    """

    def layer(xs, params: Any, state: State, shared: Any):
        if len(xs) == 1:
            return (one(halves, par)(Stream(xs[0]), params, state, shared).x_BLD,)
        xs = list(xs)
        forked = {site: fork(scales, len(xs)) for site, scales in state.items()}
        states = [{site: uses[i] for site, uses in forked.items()} for i in range(len(xs))]
        sent = None  # (its chain, the sum) that no product has waited for
        for half in halves:
            out = params[half.name][half.out_name]
            for i, state in enumerate(states):
                if sent and sent[0] == i:
                    xs[i] += sent[1]
                    sent = None
                h_BLD = enter(half.norm(xs[i], params[half.norm_name]), par, state, half.enters)
                u_BLF = half.core(h_BLD, params[half.name], shared)
                y_BLD = row(u_BLF, out["kernel"], par)
                if sent:
                    y_BLD, sum_BLD = _in_turn(y_BLD, sent[1])
                    xs[sent[0]] += checkpoint_name(sum_BLD, OUTPUT_NAME)
                sent = i, add_bias(add_up(y_BLD, par, state, half.leaves), out)
        if sent:
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
