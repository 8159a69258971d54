"""The loss and its gradients with the sum over dp of each layer's beside the backward pass of the layer before it.

`jax.grad` of a scan over layers hands all layers' gradients out at its end. Here the backward pass is a loop of its
own, which carries one layer's gradients: a round sends those of the layer after it, and waits for their sum when its
own layer's are there. XLA keeps both ends of a message in one round, so they lie around the layer's products.

    round i:  start the sum of g_(i+1)    ct, g_i = layer_i'(ct)    put the sum in its place    carry g_i

The last layer's backward pass runs before the loop, which would send zeros otherwise; the first layer's message goes
after it. Of a message with two hops the first one ends when the gradient of the layer's input is there, the second with
those of its weights. Residuals are what `taco_jax.pipeline.residuals` makes of a layer, written once and read in place.

Dims: B sequences, L length, D model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.compression.site_scales import SiteScales
from taco_jax.models import decoder
from taco_jax.models.attention import windows_of
from taco_jax.models.config import ModelConfig
from taco_jax.models.documents import documents
from taco_jax.models.run_config import Parallel
from taco_jax.pipeline.residuals import Split
from taco_jax.tensor_parallel import to_varying
from taco_jax.train.layer_sums import LayerSums


def value_and_grad(params, slots, exponents, tokens_BL: jax.Array, predicted: int, *, config: ModelConfig,
                   par: Parallel, by_layer: Any, sums: LayerSums):  # fmt: skip
    """(part of the mean loss over `predicted` tokens, (gradients, measures of the sites)) of the local batch.

    Args:
      params: as layers use them, but for what ranks of par.axis hold whole (`decoder.use_replicated_params`).
      slots, exponents: of all sites, by their names.
      tokens_BL: int32[B, L + 1].
      by_layer: a bool for each of params: its gradient is `sums`' result, summed over dp, not this rank's.
    """
    tree, is_sum = jax.tree.structure(params), jax.tree.leaves(by_layer)
    leaves = jax.tree.leaves(params)
    pick = lambda leaves, summed: [leaf for leaf, own in zip(leaves, is_sum, strict=True) if own == summed]

    def join(summed, rest):
        parts = {True: iter(summed), False: iter(rest)}
        return tree.unflatten([next(parts[own]) for own in is_sum])

    use = lambda rest: pick(
        tree.flatten_up_to(decoder.use_replicated_params(join(pick(leaves, True), rest), config, par)), False
    )
    rest, finish_grads = jax.vjp(use, pick(leaves, False))
    params = join(pick(leaves, True), rest)

    inputs_BL, targets_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
    weights_BL = to_varying(jnp.ones(targets_BL.shape), "dp")
    in_layers = lambda sites: {site: a for site, a in sites.items() if site in decoder.LAYER_SITES}
    only = lambda site: {site: slots[site]} if site in slots else {}
    state = lambda slots: {site: SiteScales(exponents[site], slot) for site, slot in slots.items()}
    ends = {name: tree for name, tree in params.items() if name != "layers"}
    layers = _Layers(params["layers"], in_layers(slots), in_layers(exponents), inputs_BL, config=config, par=par)
    axes = varying_of(params["layers"]) - {par.axis}

    def embed(ends, slots):
        x_BLD = decoder.embed(ends, inputs_BL, config, par, state(slots))
        return layers.loop.enter(to_varying(x_BLD, axes))

    def head(ends, carried, slots):
        x_BLD = decoder.after_layers(ends, layers.loop.leave(carried), config, par, state(slots))
        batch = x_BLD, targets_BL, weights_BL
        return decoder.head_loss(ends, *batch, config=config, par=par, state=state(slots))[0] / predicted

    carried, embed_pull = jax.vjp(embed, ends, only("embed"))
    carried, saved = layers.forward(carried)
    loss, head_pull = jax.vjp(head, ends, carried, only("head"))
    ends_grads, ct, head_measures = head_pull(jnp.ones_like(loss))
    ct, layer_grads, measures = layers.backward(saved, ct, by_layer["layers"], sums)
    more_grads, embed_measures = embed_pull(ct)

    grads = jax.tree.map(jnp.add, ends_grads, more_grads) | {"layers": layer_grads}
    grads = tree.flatten_up_to(grads)
    (rest,) = finish_grads(pick(grads, False))
    return loss, (join(pick(grads, True), rest), measures | head_measures | embed_measures)


def varying_of(tree: Any) -> frozenset[str]:
    """The axes over which some leaf of a tree varies."""
    return frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves(tree)))


_SMALL = 1 << 16
"""Elements of a layer's leaf that may be written with all layers' at once: norms, biases, measures."""


class _Layers:
    """Both passes over the stacked layers."""

    def __init__(self, params, slots: Mapping, exponents: Mapping, tokens_BL, *, config: ModelConfig, par: Parallel):
        self.depth = config.n_layers
        self._differentiated = params, slots
        self._others = exponents, windows_of(config)
        batch, length = tokens_BL.shape
        self.loop = decoder.layer_loop(batch, length, config, par, documents_BL=documents(tokens_BL, par.end_token))

    def forward(self, carried: Any) -> tuple[Any, list[jax.Array]]:
        """Returns (what layers carry after the last, the residuals of all)."""
        layer = self._layer(carried)

        def one(carried, of):
            return layer.forward(carried, *of, [])

        return lax.scan(one, carried, (self._differentiated, self._others))

    def backward(self, saved: list[jax.Array], ct: Any, by_layer: Any, sums: LayerSums) -> tuple[Any, Any, Any]:
        """Returns (the cotangent of what the first layer takes, the parameters' gradients, the sites' measures)."""
        layer, last = self._layer(ct), self.depth - 1
        tree, is_sum = jax.tree.structure(by_layer), jax.tree.leaves(by_layer)

        def back(i, ct):
            of = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), (saved, *self._operands))
            ct, (grads, measures) = layer.backward(of[0], *of[1:], [], ct)
            grads = tree.flatten_up_to(grads)
            own = [g for g, summed in zip(grads, is_sum, strict=True) if summed]
            return ct, own, ([g for g, summed in zip(grads, is_sum, strict=True) if not summed], measures)

        def one(carry, i):
            ct, packed, totals, rest = carry
            message = sums.start(packed, self.depth)
            ct, own, more = back(i, ct)
            if message.hops > 1:
                ct, own = message.overlap_with(ct), message.overlap_with(own)
            else:
                ct = message.overlap_with(ct)
            totals = _put(totals, sums.unpack(message.done()), i + 1)
            return (ct, sums.pack(own), totals, jax.tree.map(lambda a, g: _put_small(a, g, i), rest, more)), None

        ct, own, rest = back(last, ct)
        rest = jax.tree.map(lambda g: jnp.broadcast_to(g, (self.depth, *g.shape)), rest)
        carry = ct, sums.pack(own), sums.zeros(self.depth, own), rest
        (ct, packed, totals, rest), _ = lax.scan(one, carry, jnp.arange(last), reverse=True)
        totals = _put(totals, sums.unpack(sums.start(packed, self.depth).done()), 0)
        rest, measures = rest
        parts = {True: iter(totals), False: iter(rest)}
        return ct, tree.unflatten([next(parts[summed]) for summed in is_sum]), measures

    @property
    def _operands(self):
        return self._differentiated, self._others

    def _layer(self, carried: Any) -> Split:
        """Returns a layer, for what layers carry or a tree like it."""

        def layer(carried, differentiated, others):
            (params, slots), (exponents, sliding) = differentiated, others
            state = {site: SiteScales(exponents[site], slot) for site, slot in slots.items()}
            return self.loop.layer(carried, params, {site: state.get(site) for site in decoder.LAYER_SITES}, sliding)

        first = jax.tree.map(lambda a: a[0], self._operands)
        with comm_log.repeat(self.depth * self.loop.chains):
            return Split(layer, carried, *first)


def _put_small(total: jax.Array, value: jax.Array, i: Any) -> jax.Array:
    """The total with a small value at index i.

    An update in place of a vector would be a copy that XLA starts and ends as it does a message, and for as long: the
    layer's message would start after products that it can travel beside.
    """
    if value.size > _SMALL:
        return lax.dynamic_update_index_in_dim(total, value, i, 0)
    return jnp.where(lax.broadcasted_iota(jnp.int32, total.shape, 0) == i, value, total)


def _put(totals: list[jax.Array], values: list[jax.Array], i: Any) -> list[jax.Array]:
    """The totals with the values at index i."""
    put = lambda total, value: lax.dynamic_update_index_in_dim(total, value, i, 0)
    return [put(total, value) for total, value in zip(totals, values, strict=True)]
