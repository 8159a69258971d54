"""The public collectives: named and typed like jax.lax's, with a required `codec`.

Common arguments (besides those of the jax.lax function of the same name):
  codec: preset name or `Codec` of the forward message; "none" is jax.lax exactly.
  backward_codec: of the gradient's message; by default the same.
  scales: `SiteScales` (exponents int32[2], slot float32[2, K]) or None: no site scale.
  min_bytes: messages below this many bytes are jax.lax's own program. Default 0.
  key: for stochastic rounding; a new one for each call.
Trees are mapped over; integer and bool arrays go through exactly. bfloat16, float16 and float32 in and out, any size
and shape. Bytes sent by one rank: hops of `codec.wire_bytes`, see `taco_jax.sites`.

Raises ValueError outside a full-manual jax.shard_map(check_vma=True), and for axis_index_groups; TypeError for other
float dtypes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax import sites
from taco_jax.codec import Codec, as_codec
from taco_jax.collectives.differentiable import Operation, apply
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.region import AxisName, axis_tuple, check_region, to_varying
from taco_jax.compat import varying_axes
from taco_jax.plan import ALGORITHMS, LINKS
from taco_jax.scales import STATS_WIDTH, SiteScales


def psum(x, axis_name: AxisName, *, codec, backward_codec=None, scales=None, algorithm="auto", link="auto", min_bytes=0,
         axis_index_groups=None, key=None, site="psum"):  # fmt: skip
    """Sum over the axis in float32 and rank order, all ranks bit-identical: varying -> invarying.

    algorithm: two_shot (two hops, 2 (P-1)/P messages), one_shot (one hop, P-1 messages) or auto (one_shot for two
      ranks).
    Backward: the cotangent passes unchanged (it is the same on every rank).
    """

    def one(x, site):
        if not _is_float(x):
            return _exact(site, "psum", axis_name, x, lambda: lax.psum(x, axis_name))
        small = x.nbytes < min_bytes
        return _call("psum", x, axis_name, codec, backward_codec, scales, algorithm, key, site, small)

    _check("psum", axis_name, axis_index_groups, codec, backward_codec, algorithm, link, min_bytes, scales)
    return _map(one, x, site)


def psum_scatter(x, axis_name: AxisName, *, codec, backward_codec=None, scales=None, scatter_dimension=0,
                 axis_index_groups=None, tiled=False, link="auto", min_bytes=0, key=None,
                 site="psum_scatter"):  # fmt: skip
    """Rank r's slice of the sum along `scatter_dimension`; one hop, the own term unquantised.

    Backward: a compressed all_gather.
    """

    def one(x, site):
        dim = _dim(scatter_dimension, x.ndim)
        if not _is_float(x):
            plain = lambda: lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=tiled)
            return _exact(site, "psum_scatter", axis_name, x, plain)
        own = {"dims": (dim,), "tiled": tiled}
        small = x.nbytes < min_bytes
        return _call("psum_scatter", x, axis_name, codec, backward_codec, scales, "auto", key, site, small, **own)

    _check("psum_scatter", axis_name, axis_index_groups, codec, backward_codec, "auto", link, min_bytes, scales)
    return _map(one, x, site)


def all_gather(x, axis_name: AxisName, *, codec, backward_codec=None, scales=None, axis_index_groups=None, axis=0,
               tiled=False, to="varying", link="auto", min_bytes=0, key=None, site="all_gather"):  # fmt: skip
    """All ranks' x, stacked (or tiled: concatenated) along dim `axis`; the own shard is quantised like the others.

    to: "varying" (backward: a compressed psum_scatter) or "invarying" (backward: the own slice). `min_bytes` counts
      the result.
    """

    def one(x, site):
        ranks = lax.axis_size(axis_name)
        dim = _dim(axis, x.ndim if tiled else x.ndim + 1)
        if not _is_float(x):
            plain = lambda: lax.all_gather(x, axis_name, axis=dim, tiled=tiled, to=to)
            return _exact(site, "all_gather", axis_name, x, plain, ranks)
        own = {"dims": (dim,), "tiled": tiled, "to": to}
        small = ranks * x.nbytes < min_bytes
        return _call("all_gather", x, axis_name, codec, backward_codec, scales, "auto", key, site, small, **own)

    if to not in ("varying", "invarying"):
        raise ValueError(f"to={to!r}: must be 'varying' or 'invarying'")
    _check("all_gather", axis_name, axis_index_groups, codec, backward_codec, "auto", link, min_bytes, scales)
    return _map(one, x, site)


def all_to_all(x, axis_name: AxisName, split_axis: int, concat_axis: int, *, codec, backward_codec=None, scales=None,
               axis_index_groups=None, tiled=False, link="auto", min_bytes=0, key=None, site="all_to_all"):  # fmt: skip
    """Dim `split_axis` is cut into one piece a rank, the received pieces are joined along `concat_axis`.

    The own piece stays exact. Backward: the inverse exchange, compressed.
    """

    def one(x, site):
        dims = (_dim(split_axis, x.ndim), _dim(concat_axis, x.ndim))
        if not _is_float(x):
            plain = lambda: lax.all_to_all(x, axis_name, *dims, tiled=tiled)
            return _exact(site, "all_to_all", axis_name, x, plain)
        own = {"dims": dims, "tiled": tiled}
        small = x.nbytes < min_bytes
        return _call("all_to_all", x, axis_name, codec, backward_codec, scales, "auto", key, site, small, **own)

    _check("all_to_all", axis_name, axis_index_groups, codec, backward_codec, "auto", link, min_bytes, scales)
    return _map(one, x, site)


def ppermute(x, axis_name: AxisName, perm, *, codec, backward_codec=None, scales=None, link="auto", min_bytes=0,
             key=None, site="ppermute"):  # fmt: skip
    """x of the rank that sends here by `perm`, pairs (source, destination); zeros where none does.

    Backward: the inverse permutation, compressed.
    """
    perm = tuple((int(s), int(d)) for s, d in perm)

    def one(x, site):
        if not _is_float(x):
            return _exact(site, "ppermute", axis_name, x, lambda: lax.ppermute(x, axis_name, perm))
        small = x.nbytes < min_bytes
        return _call("ppermute", x, axis_name, codec, backward_codec, scales, "auto", key, site, small, perm=perm)

    _check("ppermute", axis_name, None, codec, backward_codec, "auto", link, min_bytes, scales)
    return _map(one, x, site)


def copy(x, axis_name: AxisName, *, codec, backward_codec=None, scales=None, algorithm="auto", link="auto",
         min_bytes=0, key=None, site="copy"):  # fmt: skip
    """Identity forward (invarying -> varying), compressed psum of the cotangent backward: Megatron's f.

    The mirror of `psum`. `codec` is unused (there is no forward message) and there so that all collectives take the
    same arguments.
    """

    def one(x, site):
        if not _is_float(x):
            return to_varying(x, axis_name)
        small = x.nbytes < min_bytes
        return _call("copy", x, axis_name, codec, backward_codec, scales, algorithm, key, site, small)

    _check("copy", axis_name, None, codec, backward_codec, algorithm, link, min_bytes, scales)
    return _map(one, x, site)


def _map(one, tree, site):
    """one(x, site) of every leaf; in a tree each leaf has a site of its own: `site`/path."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return one(jnp.asarray(x), f"{site}/{name}" if path else site)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _call(name, x, axis, codec, backward_codec, scales, algorithm, key, site, small, **own):
    if name != "copy":
        # As in jax.lax, a value that is the same on every rank is taken as one that varies.
        x = to_varying(x, axis)
    elif not varying_axes(x).isdisjoint(axis_tuple(axis)):
        raise ValueError(
            f"copy: x already varies over {axis!r}, so its gradient is not a sum over the ranks; copy takes a "
            "value that is the same on every rank"
        )
    if small or x.size == 0:
        # Not a call of jax.lax here: the custom_vjp also names the output for remat and lists both directions.
        codec = backward_codec = "none"
    scales = scales or SiteScales()
    codecs = as_codec(codec), as_codec(codec if backward_codec is None else backward_codec)
    with_stats = scales.slot is not None and scales.slot.shape[-1] == STATS_WIDTH
    calls = sites.current_calls()
    forward, backward = (
        Message(axis, c, algorithm, with_stats, Label(site, direction, calls))
        for c, direction in zip(codecs, ("forward", "backward"), strict=True)
    )
    if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(jnp.asarray(key))  # of jax.random.PRNGKey
    operation = Operation(name, forward, backward, **own)
    if x.size == 0:
        return _nothing(operation, x)
    return apply(operation, x, scales.exponents, scales.slot, key)


def _nothing(operation, x):
    """What the operation makes of an empty array, without a collective: XLA on CPU crashes in some (jax 0.11)."""
    shape = jax.eval_shape(lambda x: apply(operation, x, None, None, None), x).shape
    invarying = operation.name == "psum" or operation.to == "invarying"
    varying = varying_axes(x).difference(axis_tuple(operation.forward.axis)) if invarying else varying_axes(x)
    y = to_varying(jnp.zeros(shape, x.dtype), varying)
    return to_varying(y, operation.forward.axis) if operation.name == "copy" else y


def _exact(site, op, axis, x, run, ranks: int = 1):
    sites.exact(site, "forward", op, axis, jax.ShapeDtypeStruct((ranks * x.size,), x.dtype))
    return run()


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} is out of range for an array of {ndim} dims")
    return dim % ndim


def _check(entry, axis, groups, codec, backward_codec, algorithm, link, min_bytes, scales) -> None:
    if groups is not None:
        raise ValueError(f"{entry}: axis_index_groups is not supported; use a mesh with one axis per group level")
    for c in (codec, backward_codec):
        if not isinstance(c, Codec | str | None):
            raise TypeError(f"{entry}: codec={c!r} must be a preset name or a Codec")
        as_codec(c)
    if algorithm not in ALGORITHMS or link not in LINKS:
        raise ValueError(f"{entry}: algorithm={algorithm!r}, link={link!r}: valid are {ALGORITHMS} and {LINKS}")
    if link == "nvlink":
        raise ValueError(
            f"{entry}: link='nvlink': one-kernel NVLink collectives are not built yet; use 'auto' or 'nccl'"
        )
    if min_bytes is None or min_bytes < 0:
        raise ValueError(f"{entry}: min_bytes={min_bytes}: must be 0 or more bytes")
    if scales is not None and scales.slot is not None and scales.slot.shape not in ((2, 1), (2, STATS_WIDTH)):
        raise ValueError(
            f"{entry}: slot has shape {scales.slot.shape}: must be (2, 1), or (2, {STATS_WIDTH}) for statistics"
        )
    check_region(axis_tuple(axis) if not isinstance(axis, str) else axis, entry)
