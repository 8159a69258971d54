"""The sum over dp of one layer's gradients, as a message that can travel beside the backward pass of another layer.

It carries what `DataParallel.by_layer` names, the matrices of a layer: by a reduce-scatter into the shares that ZeRO-1
gives to the optimiser, else by an all-reduce. Each leaf begins with a block of the codec, as in a bucket. A message
with more elements than a bucket goes in chunks.

Dim letters: P data-parallel ranks, N elements of a message, or of one share of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from taco_jax import collectives
from taco_jax.collectives import comm_log
from taco_jax.collectives.async_collective import AsyncCollective
from taco_jax.collectives.transport import pack, unpack
from taco_jax.compat import varying_axes
from taco_jax.tensor_parallel import to_varying
from taco_jax.train.shards import Cut


class LayerMessage:
    """An `AsyncCollective` that is listed among the messages of gradients: most are when they end."""

    def __init__(self, message: AsyncCollective):
        self._message = message

    @property
    def hops(self) -> int:
        return self._message.hops

    def overlap_with(self, value: Any) -> Any:
        with _listed():
            return self._message.overlap_with(value)

    def done(self) -> jax.Array:
        """Finishes it, and returns the sum."""
        with _listed():
            return self._message.done()[0]


def _listed():
    return comm_log.marked("gradient", "backward")


@dataclasses.dataclass(frozen=True)
class LayerSums:
    """The messages of layers alike.

    cuts: of the leaves of one layer. sharded: a rank gets its shares alone. block: of the codec. tiled: pads shares
    [P, N] to whole tiles of kernels. options: keywords of the collective.
    """

    cuts: Sequence[Cut]
    sharded: bool
    block: int
    tiled: Callable[[jax.Array], jax.Array]
    options: dict[str, Any]

    def zeros(self, layers: int, grads: Sequence[jax.Array]) -> list[jax.Array]:
        """The sums of so many layers, none of which is known yet. grads: of one layer."""
        shape = lambda c: c.share_shape if self.sharded else c.shape
        axes = lambda g: varying_axes(g) if self.sharded else varying_axes(g) - {"dp"}
        return [to_varying(jnp.zeros((layers, *shape(c)), g.dtype), axes(g)) for c, g in zip(self.cuts, grads)]

    def pack(self, grads: Sequence[jax.Array]) -> jax.Array:
        """A layer's gradients as `start` takes them: [P, N] of shares, else [N]."""
        if self.sharded:
            return self.tiled(pack([c.rows(g) for c, g in zip(self.cuts, grads, strict=True)], self.block))
        return pack([g.reshape(-1) for g in grads], self.block)

    def start(self, packed: jax.Array, layers: int) -> LayerMessage:
        """The message of a layer, under way: its result is the sum, [N] in any case. layers: how many send one."""
        calls = layers * comm_log.current_calls()
        with _listed():
            if self.sharded:
                return LayerMessage(collectives.start_psum_scatter(packed, "dp", **self.options, calls=calls))
            return LayerMessage(collectives.start_psum(packed, "dp", "backward", **self.options, calls=calls))

    def unpack(self, summed_N: jax.Array) -> list[jax.Array]:
        """The sums of a layer's leaves, of a message's result."""
        if self.sharded:
            parts = unpack(summed_N, [math.prod(c.share_shape) for c in self.cuts], self.block)
            return [c.without_padding(part.reshape(c.share_shape)) for c, part in zip(self.cuts, parts)]
        parts = unpack(summed_N, [math.prod(c.shape) for c in self.cuts], self.block)
        return [part.reshape(c.shape) for c, part in zip(self.cuts, parts)]
