"""Data parallelism around the gradient: the sum over dp, optimiser states of shares (ZeRO-1), parameters gathered back.

    g_r   = sum over ranks of share r of the gradients            (compressed reduce-scatter, float32 sums)
    w_r  <- optimiser(w_r, g_r)                                   (float32 masters, of which rank r has share r)
    c    <- all_gather(w_r)                                       parameters none, bfloat16
    c    <- c + decode(all_gather(encode(w_r - c_r)))             parameters a codec

c is the copy that every rank computes with. Differences are small and all of one size, so 4 to 8 bits are enough, and
what a codec loses stays in the next difference: errors do not add up. Without ZeRO-1 the sum is an all-reduce.
`sdp4` is SDP4Bit's (arXiv 2410.15526): a sum in levels (`collectives/hierarchical.py`), in 8 bits inside a host, whose
links are fast, and in 4 bits between hosts.

Gradients and parameters travel in buckets: leaves side by side, each from a multiple of the codec's block, so that no
block has elements of two; a leaf above the bucket's size goes in as many chunks. Buckets depend on nothing of each
other, and that of an untied head, whose gradient is ready first, is its own: XLA may send one while it computes the
next. Layers are scanned, so that the gradients of all layers come together, when the backward pass ends; with
`data_parallel.overlap` each layer's matrices have a message of their own before that (`taco_jax.train.layer_sums`).

Bytes sent by one rank, for n elements of a device's part of the parameters and P ranks: (P-1)/P wire_bytes(n) for the
gradients, the same for the parameters; without ZeRO-1 2 (P-1)/P wire_bytes(n) for the gradients alone. In levels,
see `collectives/hierarchical.py`.

Sources: ZeRO (arXiv 1910.02054), SDP4Bit (arXiv 2410.15526).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from taco_jax import collectives
from taco_jax.codec import Codec, as_codec
from taco_jax.collectives import comm_log
from taco_jax.collectives.manual_region import axis_tuple
from taco_jax.collectives.topology import ranks_per_host
from taco_jax.collectives.transport import chunk_elements, pack, unpack
from taco_jax.compression.compression import MAX_CHUNKS, Compression
from taco_jax.config import TrainConfig, overlap
from taco_jax.train.layer_sums import LayerSums
from taco_jax.train.shards import Cut, buckets, cut

GRADIENTS, PARAMETERS = comm_log.GRADIENTS, "dp/params"
BF16 = "bfloat16"
SDP4, INSIDE, BETWEEN = "sdp4", "int8h", "int4h"


def gradient_compression(gradients: str, mesh: Mesh, devices_per_host: int | None = None) -> Compression:
    """Returns how the setting `data_parallel.gradients` sums over axis dp of `mesh`; `sdp4` depends on its hosts."""
    if gradients != SDP4:
        return Compression(gradients)
    inside = ranks_per_host(mesh, "dp", devices_per_host)
    if inside in (1, mesh.shape["dp"]):
        return Compression(BETWEEN if inside < mesh.shape["dp"] else INSIDE)
    return Compression(INSIDE, between_hosts=BETWEEN, algorithm="hierarchical", ranks_per_host=inside)


class DataParallel:
    """The messages over dp of one configuration. All methods take and return global arrays, under jit.

    sharded: ZeRO-1 is on, and there is more than one rank. has_copy: the parameters of the state are masters of which
    every rank has its share, beside a copy that it computes with.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh, specs: Any, shapes: Any):
        """specs, shapes: of the parameters; specs name no axis dp."""
        c = config.data_parallel
        self.config, self.mesh, self.specs = config, mesh, specs
        self.ranks = mesh.shape["dp"]
        self.gradients = gradient_compression(c.gradients, mesh, config.mesh.devices_per_host)
        self.sharded = c.zero1 and self.ranks > 1
        self.has_copy = self.sharded and c.parameters != "none"
        self.copy_dtype = jnp.dtype(BF16 if c.parameters == BF16 else config.compute_dtype)
        self.differences = self.has_copy and c.parameters != BF16
        sizes = dict(mesh.shape)
        # Leaves whose gradients are summed layer by layer, inside of the backward pass.
        self.by_layer = jax.tree_util.tree_map_with_path(self._is_by_layer, shapes, specs)
        own_cut = lambda shape, spec, layers: cut(shape.shape, spec, sizes, self.ranks, first=int(layers))
        self.cuts = jax.tree.map(own_cut, shapes, specs, self.by_layer)
        flat, self._tree = jax.tree_util.tree_flatten_with_path(self.cuts)
        self._cuts: list[Cut] = [c for _, c in flat]
        # A device's parts of leaves that are the same along tp stay so, as far as types can tell, only by themselves.
        groups = [(_axes(cut.spec), path[0] == jax.tree_util.DictKey("head")) for path, cut in flat]
        self._limit = max(1, int(c.bucket_mb * 1e6) // 4)
        elements = [math.prod(cut.shape) for cut in self._cuts]
        self._buckets = buckets(elements, groups, self._limit)
        self._by_layer: list[bool] = jax.tree.leaves(self.by_layer)
        rest = [i for i, layers in enumerate(self._by_layer) if not layers]
        of_rest = buckets([elements[i] for i in rest], [groups[i] for i in rest], self._limit)
        self._gradient_buckets = [[rest[i] for i in bucket] for bucket in of_rest]

    def _is_by_layer(self, path, shape, spec: P) -> bool:
        """Returns whether a leaf is summed layer by layer: layers' matrices, of which each rank of tp has its own part.

        Gradients of what ranks of tp have in common are summed over tp first, once for all layers.
        """
        in_layers = path[0] == jax.tree_util.DictKey("layers")
        return overlap(self.config)[0] and in_layers and len(shape.shape) > 2 and "tp" in _axes(spec)

    @property
    def codecs(self) -> list[str]:
        """The codecs of the messages over dp, but for `none`."""
        used = {codec.name for codec in self._gradient_codecs} | {self._parameter_codec} if self.ranks > 1 else set()
        return sorted(used - {"none"})

    @property
    def _gradient_codecs(self) -> list[Codec]:
        """The codec of the gradients' sum, and that between hosts where there is another."""
        between = self.gradients.between
        return [self.gradients.codecs[1], *([between] if between is not None else [])]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one rank's gradients before they are summed, on one device; of layers' sums, what the rank keeps."""
        kept = lambda c, layers: c.share_shape if layers and self.sharded else c.shape
        return sum(4 * math.prod(kept(c, layers)) for c, layers in zip(self._cuts, self._by_layer, strict=True))

    @property
    def share_specs(self) -> Any:
        return jax.tree.map(lambda c: c.share_spec(), self.cuts)

    @property
    def master_specs(self) -> Any:
        """Specs of `TrainState.params`."""
        return self.share_specs if self.has_copy else self.specs

    # Gradients

    @property
    def partial_specs(self) -> Any:
        """Specs of what `reduce` takes: a leading dim of dp ranks before a leaf's own dims; of sums those of sums."""
        partial = lambda spec, summed, layers: summed if layers else P("dp", *spec)
        return jax.tree.map(partial, self.specs, self.sum_specs, self.by_layer)

    @property
    def sum_specs(self) -> Any:
        """Specs of summed gradients."""
        return self.share_specs if self.sharded else self.specs

    def reduce(self, partial: Any) -> Any:
        """The sum of every rank's gradients float32[dp, ...]: shares with ZeRO-1, else whole on every rank.

        Leaves of `by_layer` are sums already.
        """
        alone = lambda g, layers: g if layers else g.squeeze(0)
        local = lambda partial: self._reduce(jax.tree.map(alone, partial, self.by_layer))
        return self._map(local, self.partial_specs, out_specs=self.sum_specs)(partial)

    def _reduce(self, grads: Any) -> Any:
        if self.ranks == 1 or (not self.sharded and self.gradients.is_exact):
            # XLA makes its own buckets of an exact sum.
            leaves = self._tree.flatten_up_to(grads)
            rest = [i for bucket in self._gradient_buckets for i in bucket]
            size = sum(leaves[i].size for i in rest)
            kind = "gradient" if any(self._by_layer) else "other"  # as the layers' messages are
            comm_log.exact(GRADIENTS, "backward", "psum", "dp", jax.ShapeDtypeStruct((size,), jnp.float32), kind=kind)
            for i, total in zip(rest, lax.psum([leaves[i] for i in rest], "dp"), strict=True):
                leaves[i] = total
            return self._tree.unflatten(leaves)
        with comm_log.marked("gradient", "backward"):
            return self._reduce_buckets(grads, self._block(*self._gradient_codecs))

    def _reduce_buckets(self, grads: Any, block: int) -> Any:
        leaves = self._tree.flatten_up_to(grads)
        out = list(leaves)
        for number, bucket in enumerate(self._gradient_buckets):
            site, cuts = f"{GRADIENTS}/{number}", [self._cuts[i] for i in bucket]
            if self.sharded:
                rows = [c.rows(leaves[i]) for c, i in zip(cuts, bucket)]
                x_PN = self._tiled(pack(rows, block), self._gradient_codecs[0])
                options = self._options(self.gradients, x_PN.size, site)
                packed = collectives.psum_scatter(x_PN, "dp", **options)
                for c, i, part in zip(cuts, bucket, unpack(packed, [r.shape[-1] for r in rows], block)):
                    out[i] = c.without_padding(part.reshape(c.share_shape))
            else:
                x_N = pack([leaves[i].reshape(-1) for i in bucket], block)
                packed = collectives.psum(x_N, "dp", **self._options(self.gradients, x_N.size, site))
                for i, part in zip(bucket, unpack(packed, [leaves[i].size for i in bucket], block)):
                    out[i] = part.reshape(leaves[i].shape)
        return self._tree.unflatten(out)

    @property
    def layer_sums(self) -> LayerSums:
        """The messages of one layer's gradients."""
        cuts = [c.of_layer() for c, layers in zip(self._cuts, self._by_layer, strict=True) if layers]
        codec, block = self._gradient_codecs[0], self._block(*self._gradient_codecs)
        size = sum(math.prod(c.shape) + -math.prod(c.shape) % block for c in cuts)
        options = self._options(self.gradients, size, f"{GRADIENTS}/layer")
        tiled = functools.partial(self._tiled, codec=codec)
        return LayerSums(cuts, self.sharded, block, tiled, options)

    # Parameters

    def masters(self, params: Any) -> Any:
        """The float32 weights that this rank's optimiser updates: its shares of the state's parameters, or all."""
        return self.own(params) if self.sharded and not self.has_copy else params

    def own(self, whole: Any) -> Any:
        """Whole leaves -> their shares, without a message."""
        local = lambda whole: jax.tree.map(lambda c, x: c.own(x), self.cuts, whole)
        return self._map(local, self.specs, out_specs=self.share_specs)(whole)

    def spread(self, masters: Any, copy: Any) -> tuple[Any, Any]:
        """(parameters, copy) of the next state, from updated masters and the copy so far."""
        if not self.sharded:
            return masters, None
        local = functools.partial(self._gather, codec=as_codec(self._parameter_codec), dtype=self.gather_dtype)
        with comm_log.marked("parameter", "forward"):
            if not self.differences:
                whole = self._map(local, self.share_specs, out_specs=self.specs)(masters)
                return (masters, whole) if self.has_copy else (whole, None)

            def add(masters, copy):
                own = jax.tree.map(lambda c, w: c.own(w).astype(jnp.float32), self.cuts, copy)
                change = local(jax.tree.map(jnp.subtract, masters, own))
                return jax.tree.map(lambda w, d: (w.astype(jnp.float32) + d).astype(w.dtype), copy, change)

            return masters, self._map(add, self.share_specs, self.specs, out_specs=self.specs)(masters, copy)

    def whole(self, shares: Any) -> Any:
        """Shares -> whole leaves, exactly: for what happens once, not in a step."""
        local = functools.partial(self._gather, codec=as_codec("none"), dtype=jnp.float32)
        return self._map(local, self.share_specs, out_specs=self.specs)(shares)

    @property
    def _parameter_codec(self) -> str:
        return self.config.data_parallel.parameters if self.differences else "none"

    @property
    def gather_dtype(self):
        """Dtype of the values that `spread` sends, before any codec."""
        return self.copy_dtype if self.has_copy and not self.differences else jnp.dtype(jnp.float32)

    def _gather(self, shares: Any, codec: Codec, dtype) -> Any:
        """Every rank's shares as whole leaves of `dtype`."""
        leaves, block = self._tree.flatten_up_to(shares), self._block(codec)
        out = list(leaves)
        for number, bucket in enumerate(self._buckets):
            cuts = [self._cuts[i] for i in bucket]
            x_N = self._tiled(pack([leaves[i].reshape(-1) for i in bucket], block), codec).astype(dtype)
            if dtype == BF16:
                # As bits: XLA on CPU would widen the message.
                x_N = lax.bitcast_convert_type(x_N, jnp.uint16)
            options = self._options(Compression(codec), self.ranks * x_N.size, f"{PARAMETERS}/{number}")
            x_PN = collectives.all_gather(x_N, "dp", to="invarying", **options)
            if dtype == BF16:
                x_PN = lax.bitcast_convert_type(x_PN, jnp.bfloat16)
            for c, i, part in zip(cuts, bucket, unpack(x_PN, [leaves[i].size for i in bucket], block)):
                out[i] = c.join(part)
        return self._tree.unflatten(out)

    def _map(self, local, *in_specs, out_specs):
        return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def _options(self, compression: Compression, size: int, site: str) -> dict[str, Any]:
        """Keywords of a bucket's message of `size` float32 values. Peer memory is left to the layers."""
        chunks, backend = min(MAX_CHUNKS, math.ceil(size / self._limit)), self.config.compression.backend
        changed = dataclasses.replace(compression, min_bytes=0, chunks=chunks, backend=backend, link="nccl")
        return {"compression": changed, "site": site}

    def _tiled(self, x: jax.Array, codec: Codec) -> jax.Array:
        """Shares [..., N] of whole tiles of kernels where that costs little: an all-reduce sees to it by itself."""
        if codec.exact:
            return x
        return pack([x], chunk_elements(codec, self.ranks * x.shape[-1], self.ranks))

    @staticmethod
    def _block(*codecs: Codec) -> int:
        return max(1 if codec.exact else codec.block for codec in codecs)


def _axes(spec: P) -> frozenset[str]:
    return frozenset(a for entry in spec if entry is not None for a in axis_tuple(entry))
