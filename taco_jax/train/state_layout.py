"""The layout of a training state in a checkpoint, the same on every mesh: whole leaves, as the model has them.

A state's arrays are stored as they are, however they are spread, with three exceptions. Shares of a leaf that no dim of
which divides over dp (`taco_jax.train.shards`) are stored without their padding. Layers in chunks
(`pipeline.layout`) are one array. And the copy that ranks compute with is stored only where the master weights do
not say what it is, which is where it follows them in compressed differences; a run that finds none makes it from them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.collectives.manual_region import axis_tuple
from taco_jax.pipeline import layout
from taco_jax.train import optim
from taco_jax.train.data_parallel import DataParallel
from taco_jax.train.shards import Cut

_WHOLE = "whole"  # of a leaf that is stored as it is


def gathered(a: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    """`a` with its layers on every stage, where XLA can change their order in no other way, which it would complain of.

    That is where devices hold the same part of `target`; elsewhere they exchange layers.
    """
    mesh, spec = target.sharding.mesh, target.sharding.spec
    cut = {axis for entry in spec if entry is not None for axis in axis_tuple(entry)}
    if a.shape == target.shape or cut >= {axis for axis, size in mesh.shape.items() if size > 1}:
        return a
    rest = min(a.ndim, len(target.shape)) - 1
    whole = P(*[None] * (a.ndim - rest), *[P.UNCONSTRAINED] * rest)
    return lax.with_sharding_constraint(a, NamedSharding(mesh, whole))


class Stored:
    """The way between a state and what is stored of it. shapes: of the latter, with the mesh's shardings."""

    def __init__(self, data_parallel: DataParallel, state: Any, chunks: int):
        """state: the training state as ShapeDtypeStructs with shardings, its layers in so many chunks."""
        self._dp, self._chunks = data_parallel, chunks
        tags = jax.tree.map(lambda _: _WHOLE, state)
        if data_parallel.sharded:
            padded = jax.tree.map(lambda c: c if c.padding else _WHOLE, data_parallel.cuts)
            moments = optim.map_params(lambda _, c: c, state.opt_state, padded, other=lambda _: _WHOLE)
            params = padded if data_parallel.has_copy else tags.params
            tags = dataclasses.replace(tags, params=params, opt_state=moments)
        # One entry for each leaf of a state: its cut where it is padded.
        self._cuts: list[Cut | None] = [c if isinstance(c, Cut) else None for c in jax.tree.leaves(tags)]
        leaves, structure = jax.tree.flatten(state)
        shapes = [a if c is None else self._shape(a, c) for a, c in zip(leaves, self._cuts)]
        self._in_chunks = self._kept(jax.tree.unflatten(structure, shapes))
        self.shapes = self._each_param(layout.joined(chunks, data_parallel.mesh), self._in_chunks)

    def _shape(self, a, c: Cut) -> jax.ShapeDtypeStruct:
        # Of the leaf's global size: other axes have as many parts of it as before.
        shape = list(a.shape)
        shape[c.dim] = a.shape[c.dim] // (c.share * c.ranks) * c.shape[c.dim]
        return jax.ShapeDtypeStruct(tuple(shape), a.dtype, sharding=NamedSharding(self._dp.mesh, c.spec))

    def _kept(self, state: Any) -> Any:
        return state if self._dp.differences else dataclasses.replace(state, copy=None)

    def pack(self, state: Any) -> Any:
        """A state -> what is stored of it. Arrays that need no change are the state's own."""
        state = dataclasses.replace(state, base=None)  # which has a place of its own
        state = self._kept(self._change(state, self._without_padding))
        return state if self._chunks == 1 else self._reshaped(layout.join, state, self.shapes)

    def unpack(self, stored: Any) -> Any:
        """The inverse; `copy` may be None where the state has one."""
        if self._chunks > 1:
            shapes = self._in_chunks if stored.copy is not None else dataclasses.replace(self._in_chunks, copy=None)
            stored = self._reshaped(layout.split, stored, shapes)
        state = self._change(stored, self._own_shares)
        if self._dp.has_copy and state.copy is None:
            make = lambda masters: jax.tree.map(lambda w: w.astype(self._dp.copy_dtype), self._dp.whole(masters))
            shardings = jax.tree.map(lambda spec: NamedSharding(self._dp.mesh, spec), self._dp.specs)
            state = dataclasses.replace(state, copy=jax.jit(make, out_shardings=shardings)(state.params))
        return state

    def _reshaped(self, way, state: Any, shapes: Any) -> Any:
        def reshape(state):
            return self._each_param(way(self._chunks), jax.tree.map(gathered, state, shapes))

        return jax.jit(reshape, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))(state)

    def _each_param(self, function, state: Any) -> Any:
        """The state with function(leaf, whether it is stacked over layers) of parameters, moments and copy."""
        stacked = layout.in_layers(state.params)
        each = lambda tree: None if tree is None else jax.tree.map(function, tree, stacked)
        opt_state = optim.map_params(function, state.opt_state, stacked)
        return dataclasses.replace(state, params=each(state.params), opt_state=opt_state, copy=each(state.copy))

    def _change(self, state: Any, run) -> Any:
        """`run` of the padded leaves alone; all others stay the arrays that they are."""
        # A copy, which may be there or not, has the last leaves.
        leaves, structure = jax.tree.flatten(state)
        padded = [i for i, c in enumerate(self._cuts[: len(leaves)]) if c is not None]
        if padded:
            for i, new in zip(padded, run([leaves[i] for i in padded])):
                leaves[i] = new
        return jax.tree.unflatten(structure, leaves)

    @functools.cached_property
    def _without_padding(self):
        def whole(x, c: Cut):
            x = lax.all_gather(x, "dp", axis=c.dim, tiled=True, to="invarying")
            return lax.slice_in_dim(x, 0, c.shape[c.dim], axis=c.dim)

        return self._jitted(whole, Cut.share_spec, lambda c: c.spec)

    @functools.cached_property
    def _own_shares(self):
        return self._jitted(lambda x, c: c.own(x), lambda c: c.spec, Cut.share_spec)

    def _jitted(self, change, spec_in, spec_out):
        cuts = [c for c in self._cuts if c is not None]
        run = jax.shard_map(
            lambda xs: [change(x, c) for x, c in zip(xs, cuts)],
            mesh=self._dp.mesh,
            in_specs=([spec_in(c) for c in cuts],),
            out_specs=[spec_out(c) for c in cuts],
        )
        return jax.jit(run)
