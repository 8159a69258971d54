"""How a leaf is cut into one share for each data-parallel rank, and which leaves travel together.

A leaf is cut along one dim, in equal contiguous pieces. Where no dim divides, one is padded with zeros at its end, on
every device by itself: the array of shares is then longer than the leaf. Elements stay where they are, so what is
cut along dp may be cut along tp or pp as well, along the same dim too.

Dim letters: P data-parallel ranks, N elements of one share (of one leaf, or of a message), in the leaf's order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from taco_jax.collectives.manual_region import AxisName, axis_tuple, to_varying


@dataclasses.dataclass(frozen=True)
class Cut:
    """A device's part of a leaf, of `shape`, cut along `dim` into `ranks` shares of `share` rows, the last one padded.

    spec: how the leaf is spread over the other mesh axes.
    """

    shape: tuple[int, ...]
    ranks: int
    dim: int
    spec: PartitionSpec

    @property
    def share(self) -> int:
        return -(-self.shape[self.dim] // self.ranks)

    @property
    def padding(self) -> int:
        """Rows of zeros after the last share's own."""
        return self.share * self.ranks - self.shape[self.dim]

    @property
    def share_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.share, *self.shape[self.dim + 1 :])

    def share_spec(self, axis: AxisName = "dp") -> PartitionSpec:
        """The spec of the array that all shares are."""
        entries = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        own = entries[self.dim]
        axes = (*(() if own is None else axis_tuple(own)), *axis_tuple(axis))
        entries[self.dim] = axes if len(axes) > 1 else axes[0]
        return PartitionSpec(*entries)

    def of_layer(self) -> Cut:
        """The cut of one layer of a stacked leaf, which is not cut along its layers."""
        return Cut(self.shape[1:], self.ranks, self.dim - 1, PartitionSpec(*self.spec[1:]))

    def rows(self, x: jax.Array) -> jax.Array:
        """A device's part of the leaf -> [P, N], all shares."""
        x = self._padded(x)
        x = x.reshape(*self.shape[: self.dim], self.ranks, self.share, *self.shape[self.dim + 1 :])
        return jnp.moveaxis(x, self.dim, 0).reshape(self.ranks, -1)

    def join(self, x_PN: jax.Array) -> jax.Array:
        """The inverse of `rows`: the padding is cut off."""
        x = jnp.moveaxis(x_PN.reshape(self.ranks, *self.share_shape), 0, self.dim)
        x = x.reshape(*self.shape[: self.dim], -1, *self.shape[self.dim + 1 :])
        return lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim) if self.padding else x

    def own(self, x: jax.Array, axis: AxisName = "dp") -> jax.Array:
        """This rank's share of the leaf."""
        x = self._padded(to_varying(x, axis))
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * self.share, self.share, self.dim)

    def without_padding(self, x: jax.Array, axis: AxisName = "dp") -> jax.Array:
        """This rank's share with zeros where the leaf has nothing: a codec may have left noise there."""
        if not self.padding:
            return x
        row = lax.axis_index(axis) * self.share + lax.broadcasted_iota(jnp.int32, x.shape, self.dim)
        return jnp.where(row < self.shape[self.dim], x, 0)

    def _padded(self, x: jax.Array) -> jax.Array:
        if not self.padding:
            return x
        widths = [(0, self.padding if dim == self.dim else 0) for dim in range(x.ndim)]
        return jnp.pad(x, widths)


def cut(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int], ranks: int, first: int = 0) -> Cut:
    """The cut of a leaf of global `shape`, spread over mesh axes of `sizes` as `spec` says, with the least padding.

    Of several such dims it is the first: shares are then the most contiguous. first: the first dim that may be cut.
    """
    parts = [math.prod(sizes[a] for a in axis_tuple(entry)) if entry is not None else 1 for entry in spec]
    local = tuple(n // p for n, p in itertools.zip_longest(shape, parts, fillvalue=1))
    cuts = [Cut(local, ranks, dim, spec) for dim in range(first, len(shape))]
    return min(cuts, key=lambda c: math.prod(c.share_shape))


def buckets(sizes: list[int], groups: list, limit: int) -> list[list[int]]:
    """Indices of leaves of these sizes that travel together: of one group, in order, at most `limit` in all.

    A leaf above the limit is a bucket of its own.
    """
    out: dict = {}
    for i, (size, group) in enumerate(zip(sizes, groups, strict=True)):
        open_ = out.setdefault(group, [])
        if open_ and sum(sizes[j] for j in open_[-1]) + size <= limit:
            open_[-1].append(i)
        else:
            open_.append([i])
    return [bucket for lists in out.values() for bucket in lists]
