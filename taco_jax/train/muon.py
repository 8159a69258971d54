"""Muon for the matrices of the layers: a momentum whose singular values are made equal by Newton-Schulz steps.

    m <- b m + (1 - b) g
    w <- w - lr(t) * (0.2 sqrt(max(in, out)) orthogonal(b m^ + (1 - b) g^) + decay * w)

Each layer's matrix [in, out] is treated by itself. m^ and g^ are corrected for their bias, as in optax.contrib.muon,
whose Newton-Schulz steps these are. The factor 0.2 sqrt(max(in, out)) gives an update the root mean square of AdamW's,
so that both take one learning rate (Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982).

Sources: Jordan et al., https://kellerjordan.github.io/posts/muon; optax.contrib.muon.

A matrix must be whole where it is made orthogonal. Ranks that hold parts of matrices exchange layers for parts: each
gets whole matrices of some of the layers, works on those, and sends the parts back. For n elements on a device, and P
ranks of the axis, both exchanges together send 2 (P-1)/P 4n bytes (more where P does not divide the layers).

Dim letters: N layers, I and O a matrix' rows and columns; lower case: a rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from taco_jax.collectives import comm_log
from taco_jax.collectives.manual_region import axis_tuple
from taco_jax.train.data_parallel import DataParallel
from taco_jax.train.shards import Cut

RMS = 0.2
"""Root mean square of an update at learning rate 1: that of AdamW's (arXiv 2502.16982, section 2.2)."""
SITE = "muon"


class MomentumState(NamedTuple):
    """The state of `scale_by_momentum`: count int32, mu as the parameters."""

    count: jax.Array
    mu: Any


def scale_by_momentum(beta: float, orthogonal: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Returns Nesterov's momentum, made orthogonal: all of Muon but decay and learning rate.

    orthogonal: a tree of momenta -> the tree of their updates.
    """

    def init(params: Any) -> MomentumState:
        return MomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    def update(grads: Any, state: MomentumState, params: Any = None) -> tuple[Any, MomentumState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(grads, beta, count)
        looked = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, ahead, now)
        return orthogonal(looked), MomentumState(count, mu)

    return optax.GradientTransformation(init, update)


def orthogonal(x_NIO: jax.Array) -> jax.Array:
    """Each matrix of x with singular values near 1, times RMS sqrt(max(I, O)). Zeros stay zeros."""
    # With beta 0 and no look ahead the momentum is x itself: what is left of optax's Muon is Newton-Schulz.
    dims = MuonDimensionNumbers(reduction_axis=x_NIO.ndim - 2, output_axis=x_NIO.ndim - 1)
    newton_schulz = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dims)
    out_NIO, _ = newton_schulz.update(x_NIO, newton_schulz.init(x_NIO))
    return RMS * math.sqrt(max(x_NIO.shape[-2:])) * out_NIO


def orthogonal_each(tree: Any) -> Any:
    """`orthogonal` of every leaf [..., I, O] of a tree, which are whole."""
    return jax.tree.map(orthogonal, tree)


class _Move(NamedTuple):
    """An exchange over mesh axis `axis`: layers for dim `dim` of the matrix, which then has `size` rows or columns."""

    axis: str
    dim: int
    size: int


class WholeMatrices:
    """`orthogonal` of a tree of global arrays that are spread over the mesh as parameters are, or their shares."""

    def __init__(self, data_parallel: DataParallel, stacked_dims: int):
        """stacked_dims: leading dims of a leaf that count layers."""
        self._dp, self._stacked = data_parallel, stacked_dims
        self._cuts = dict(jax.tree_util.tree_flatten_with_path(data_parallel.cuts)[0])

    def __call__(self, tree: Any) -> Any:
        flat, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
        cuts = [self._cuts[path] for path, _ in flat]
        specs = [cut.share_spec() if self._dp.sharded else cut.spec for cut in cuts]

        def local(xs: list[jax.Array]) -> list[jax.Array]:
            return [self._local(f"{SITE}/{name}", x, cut) for name, x, cut in zip(names, xs, cuts)]

        run = jax.shard_map(local, mesh=self._dp.mesh, in_specs=(specs,), out_specs=specs)
        return jax.tree.unflatten(structure, run([leaf for _, leaf in flat]))

    def _local(self, site: str, x: jax.Array, cut: Cut) -> jax.Array:
        x_Nio = x.reshape(-1, *x.shape[-2:])
        return self._exchanged(site, x_Nio, self._moves(cut)).reshape(x.shape)

    def _moves(self, cut: Cut) -> list[_Move]:
        """The exchanges after which a device has whole matrices, shares first: they are cut out of other parts."""
        moves, sizes = [], dict(self._dp.mesh.shape)
        if self._dp.sharded and cut.dim >= self._stacked:
            moves.append(_Move("dp", cut.dim - self._stacked, cut.shape[cut.dim]))
        entries = [*cut.spec, *[None] * (len(cut.shape) - len(cut.spec))]
        for dim, entry in enumerate(entries[self._stacked :]):
            size = cut.shape[self._stacked + dim]
            for axis in () if entry is None else reversed(axis_tuple(entry)):
                size *= sizes[axis]
                moves += [_Move(axis, dim, size)] if sizes[axis] > 1 else []
        return moves

    def _exchanged(self, site: str, x_Nio: jax.Array, moves: list[_Move]) -> jax.Array:
        if not moves:
            return orthogonal(x_Nio)
        (axis, dim, size), layers, dim = moves[0], x_Nio.shape[0], moves[0].dim + 1
        ranks = lax.axis_size(axis)
        x = _padded(x_Nio, 0, -(-layers // ranks) * ranks)
        comm_log.exact(site, "forward", "all_to_all", axis, x)
        x = lax.all_to_all(x, axis, 0, dim, tiled=True)
        whole = lax.slice_in_dim(x, 0, size, axis=dim)  # without the padding of the last share
        out = _padded(self._exchanged(site, whole, moves[1:]), dim, x.shape[dim])
        comm_log.exact(site, "backward", "all_to_all", axis, out)
        return lax.all_to_all(out, axis, dim, 0, tiled=True)[:layers]


def _padded(x: jax.Array, dim: int, size: int) -> jax.Array:
    """x with zeros at the end of a dim, `size` long then."""
    widths = [(0, size - x.shape[dim] if d == dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths) if size > x.shape[dim] else x
