"""The public collectives: named and typed like jax.lax's, with a required `compression`.

Common arguments (besides those of the jax.lax function of the same name):
  compression: a `Compression`, or what makes one: a preset's name or `Codec` for both directions, or
    "FORWARD:BACKWARD". "none" and None are jax.lax exactly.
  scales: `SiteScales` (exponents int32[2], slot float32[2, K]) or None: no site scale.
  key: for stochastic rounding; a new one for each call.
  site: the name of its messages in the site table.
Trees are mapped over; integer and bool arrays go through exactly. bfloat16, float16 and float32 in and out, any size
and shape. A codec with a scale for each token takes the last dim for one; a collective that cuts or joins that dim
raises ValueError. Bytes sent by one rank: hops of `codec.wire_bytes`, see `taco_jax.collectives.comm_log`.

In a region that is manual over some mesh axes only (axis_names={"tp"}) a message is cut over the rest, so that
devices send their own pieces: as the type of x says on Explicit axes, along the first dim that can be cut on Auto axes.
XLA moves an operand that lies otherwise there and back; `jax.shard_map` over all axes, or a second one over the rest
around the call, says how it lies. `psum_with_feedback` and `start_psum` want all axes.

Raises ValueError outside a jax.shard_map(check_vma=True) that is manual over the axis, and for axis_index_groups;
TypeError for other float dtypes, for keys that are none, and for options that are given one by one.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.collectives.async_collective import AsyncCollective, without_derivative
from taco_jax.collectives.call import DIRECTIONS, Call, check_call
from taco_jax.collectives.manual_region import AxisName, Rest, axis_tuple, cut_over_rest, permute, to_varying
from taco_jax.collectives.message import Label
from taco_jax.collectives.vjp import Operation, apply, start_all_reduce, start_reduce_scatter
from taco_jax.compat import varying_axes
from taco_jax.compression.compression import as_integer, refuse_options

# What the forward and the backward message of a collective is, where that is another one's.
MESSAGES = {"copy": ("psum", "psum"), "psum_scatter": ("psum_scatter", "all_gather"),
            "all_gather": ("all_gather", "psum_scatter")}  # fmt: skip
# What collectives once took beside `compression`; all but the first two are fields of it.
OLD_SPELLINGS = ("codec", "backward_codec", "algorithm", "ranks_per_host", "between_hosts", "link", "min_bytes",
                 "backend", "chunks", "exchange")  # fmt: skip


def new_spelling(collective):
    """The collective, which raises TypeError with the new spelling for the options that it took one by one before."""

    @functools.wraps(collective)
    def checked(*args, **kwargs):
        refuse_options(collective.__name__, kwargs, OLD_SPELLINGS)
        return collective(*args, **kwargs)

    return checked


@new_spelling
def psum(x, axis_name: AxisName, *, compression, axis_index_groups=None, scales=None, key=None, site="psum"):
    """Sum over the axis in float32 and rank order, all ranks bit-identical: varying -> invarying.

    `compression.algorithm`: two_shot (two hops, 2 (P-1)/P messages), one_shot (one hop, P-1 messages), hierarchical
      (three or four hops, 1/ranks_per_host as much between hosts) or auto (of several hosts hierarchical; on one the
      faster one, where that was measured (`python -m taco_jax.tune`); else one_shot for two ranks).
    Backward: the cotangent passes unchanged (it is the same on every rank).
    """

    def one(x, site):
        if not _is_float(x):
            return _exact(site, "psum", axis_name, x, lambda: lax.psum(x, axis_name))
        return _call("psum", x, site, call)

    call = _checked("psum", axis_name, compression, scales=scales, key=key, groups=axis_index_groups)
    return _map(one, x, site)


@new_spelling
def psum_scatter(x, axis_name: AxisName, *, compression, scatter_dimension=0, axis_index_groups=None, tiled=False,
                 scales=None, key=None, site="psum_scatter"):  # fmt: skip
    """Rank r's slice of the sum along `scatter_dimension`; one hop, the own term unquantised.

    Backward: a compressed all_gather.
    """

    def one(x, site):
        dim = _dim("scatter_dimension", scatter_dimension, x.ndim)
        if not _is_float(x):
            plain = lambda: lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=tiled)
            return _exact(site, "psum_scatter", axis_name, x, plain)
        own = {"dims": (dim,), "tiled": tiled}
        return _call("psum_scatter", x, site, call, **own)

    call = _checked("psum_scatter", axis_name, compression, scales=scales, key=key, groups=axis_index_groups)
    return _map(one, x, site)


@new_spelling
def all_gather(x, axis_name: AxisName, *, compression, axis_index_groups=None, axis=0, tiled=False, to="varying",
               scales=None, key=None, site="all_gather"):  # fmt: skip
    """All ranks' x, stacked (or tiled: concatenated) along dim `axis`; the own shard is quantised like the others.

    to: "varying" (backward: a compressed psum_scatter) or "invarying" (backward: the own slice). `min_bytes` counts
      the result.
    """

    def one(x, site):
        ranks = lax.axis_size(axis_name)
        dim = _dim("axis", axis, x.ndim if tiled else x.ndim + 1)
        if not _is_float(x):
            plain = lambda: lax.all_gather(x, axis_name, axis=dim, tiled=tiled, to=to)
            return _exact(site, "all_gather", axis_name, x, run=plain, ranks=ranks)
        own = {"dims": (dim,), "tiled": tiled, "to": to}
        return _call("all_gather", x, site, call, **own)

    if to not in ("varying", "invarying"):
        raise ValueError(f"to={to!r}: must be 'varying' or 'invarying'")
    call = _checked("all_gather", axis_name, compression, scales=scales, key=key, groups=axis_index_groups)
    return _map(one, x, site)


@new_spelling
def all_to_all(x, axis_name: AxisName, split_axis: int, concat_axis: int, *, compression, axis_index_groups=None,
               tiled=False, scales=None, key=None, site="all_to_all"):  # fmt: skip
    """Dim `split_axis` is cut into one piece a rank, the received pieces are joined along `concat_axis`.

    The own piece stays exact. Backward: the inverse exchange, compressed.
    """

    def one(x, site):
        dims = (_dim("split_axis", split_axis, x.ndim), _dim("concat_axis", concat_axis, x.ndim))
        if not _is_float(x):
            plain = lambda: lax.all_to_all(x, axis_name, *dims, tiled=tiled)
            return _exact(site, "all_to_all", axis_name, x, plain)
        own = {"dims": dims, "tiled": tiled}
        return _call("all_to_all", x, site, call, **own)

    call = _checked(
        "all_to_all", axis_name, compression, scales=scales, key=key, groups=axis_index_groups, levels=False
    )
    return _map(one, x, site)


@new_spelling
def ppermute(x, axis_name: AxisName, perm, *, compression, scales=None, key=None, site="ppermute"):
    """x of the rank that sends here by `perm`, pairs (source, destination); zeros where none does.

    Over several axes ranks count as jax.lax.axis_index(axis_name) does, in the order of the tuple (jax.lax.ppermute's
    own order depends on the version of jax). Backward: the inverse permutation, compressed.
    """
    perm = _pairs(perm)

    def one(x, site):
        if not _is_float(x):
            return _exact(site, "ppermute", axis_name, x, lambda: permute(x, axis_name, perm))
        return _call("ppermute", x, site, call, perm=perm)

    call = _checked("ppermute", axis_name, compression, scales=scales, key=key, levels=False)
    return _map(one, x, site)


@new_spelling
def copy(x, axis_name: AxisName, *, compression, scales=None, key=None, site="copy"):
    """Identity forward (invarying -> varying), compressed psum of the cotangent backward: Megatron's f.

    The mirror of `psum`: there is no forward message.
    """

    def one(x, site):
        if not _is_float(x):
            return to_varying(x, axis_name)
        return _call("copy", x, site, call)

    call = _checked("copy", axis_name, compression, scales=scales, key=key)
    return _map(one, x, site)


@new_spelling
def start_psum(
    x, axis_name: AxisName, direction: str, *, compression, scales=None, calls=1, site="psum"
) -> AsyncCollective:
    """The message of `psum` (direction "forward") or of `copy` ("backward") under way, for the caller to time its hops.

    It has no derivative, and raises NotImplementedError if a compressed one is asked for: this is for those who write
    both directions themselves. One array, not a tree. calls: as of `sites.current_calls()` where the forward message
    was made.

    Raises:
      ValueError: a direction that is neither.
    """
    call = check_call("start_psum", axis_name, compression, scales=scales)
    if direction not in DIRECTIONS:
        raise ValueError(f"start_psum: direction={direction!r}: must be one of {', '.join(DIRECTIONS)}")
    x = jnp.asarray(x)
    message = call.message(Label(site, direction, calls), x.shape, x.nbytes)
    if not message.codec.exact:
        x = without_derivative(x)
    exponents = call.scales.exponents
    exponent = None if exponents is None else exponents[DIRECTIONS.index(direction)]
    return start_all_reduce(message, to_varying(x, axis_name), exponent, None)


def start_psum_scatter(x_PN, axis_name: AxisName, *, compression, calls=1, site="psum_scatter") -> AsyncCollective:
    """`psum_scatter` of an array [P, N] along its first dim under way, for the caller to time its hops: [N] of rank r.

    As `start_psum` it has no derivative. calls: how often the message is sent in a step.
    """
    call = check_call("start_psum_scatter", axis_name, compression)
    x_PN = jnp.asarray(x_PN)
    if x_PN.ndim != 2 or x_PN.shape[0] != (ranks := lax.axis_size(axis_name)):
        raise ValueError(f"start_psum_scatter: x is {list(x_PN.shape)}: must be [P, N], of P={ranks} ranks")
    message = call.message(Label(site, "forward", calls), x_PN.shape, x_PN.nbytes, operation="psum_scatter",
                           one_kernel=False)  # fmt: skip
    if not message.codec.exact:
        x_PN = without_derivative(x_PN)
    return start_reduce_scatter(message, to_varying(x_PN, axis_name))


_checked = functools.partial(check_call, partly=True)


def _map(one, tree, site):
    """one(x, site) of every leaf; in a tree each leaf has a site of its own: `site`/path."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return one(jnp.asarray(x), f"{site}/{name}" if path else site)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def _call(name, x, site, call: Call, **own):
    axis = call.axis
    if name != "copy":
        # As in jax.lax, a value that is the same on every rank is taken as one that varies.
        x = to_varying(x, axis)
    elif not varying_axes(x).isdisjoint(axis_tuple(axis)):
        raise ValueError(
            f"copy: x already varies over {axis!r}, so its gradient is not a sum over the ranks; copy takes a "
            "value that is the same on every rank"
        )
    _check_tokens(name, x, call, own.get("dims", ()))
    rest = _rest(name, x, call, own)
    shape = x.shape if rest is None else rest.piece(x.shape)
    nbytes = math.prod(shape) * x.dtype.itemsize * (lax.axis_size(axis) if name == "all_gather" else 1)
    forward, backward = (
        call.message(Label(site, direction, comm_log.current_calls(direction)), shape, nbytes, operation=operation)
        for direction, operation in zip(DIRECTIONS, MESSAGES.get(name, (name, name)))
    )
    operation = Operation(name, forward, backward, rest=rest, **own)
    if x.size == 0:
        return _nothing(operation, x)
    return apply(operation, x, call.scales.exponents, call.scales.slot, call.key)


def _rest(name, x, call: Call, own) -> Rest | None:
    """How the mesh axes over which the region is not manual cut x; None where there are none.

    A token of a codec with a scale for each stays whole.
    """
    if x.size == 0 or call.compression.is_exact:
        return None
    dims = Operation(name, None, None, **own).result_dims(x.ndim)
    if dims and any(codec.per_token for codec in call.compression.codecs):
        dims[-1] = None
    return cut_over_rest(name, x, dims)


def _check_tokens(name, x, call: Call, dims: tuple[int, ...]) -> None:
    """Raises ValueError where a rank's part would not be whole tokens of a codec that has a scale for each."""
    codec = next((codec for codec in call.compression.codecs if codec.per_token), None)
    if codec is not None and x.ndim - 1 in dims:
        raise ValueError(
            f"{name}: codec {codec.name!r} has one scale a token, and dim {x.ndim - 1}, the tokens' own, is cut or "
            "joined here; take another dim, or a codec whose blocks have a size, such as 'int8h'"
        )


def _nothing(operation, x):
    """Returns what the operation makes of an empty array, without a collective: XLA on CPU crashes in some (0.11)."""
    shape = jax.eval_shape(lambda x: apply(operation, x, None, None, None), x).shape
    invarying = operation.name == "psum" or operation.to == "invarying"
    varying = varying_axes(x).difference(axis_tuple(operation.forward.axis)) if invarying else varying_axes(x)
    y = to_varying(jnp.zeros(shape, x.dtype), varying)
    return to_varying(y, operation.forward.axis) if operation.name == "copy" else y


def _exact(site, op, axis, x, run, ranks: int = 1):
    comm_log.exact(site, "forward", op, axis, jax.ShapeDtypeStruct((ranks * x.size,), x.dtype))
    return run()


def _is_float(x) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _dim(key: str, dim: int, ndim: int) -> int:
    dim = as_integer(key, dim, "must be an integer, a dim of the array")
    if not -ndim <= dim < ndim:
        raise ValueError(f"{key}={dim}: dim {dim} is out of range for an array of {ndim} dims")
    return dim % ndim


def _pairs(perm) -> tuple[tuple[int, int], ...]:
    rule = "must be pairs of ranks, (source, destination)"
    try:
        pairs = [(source, destination) for source, destination in perm]
    except (TypeError, ValueError):
        raise TypeError(f"ppermute: perm={perm!r}: {rule}") from None
    return tuple(tuple(as_integer("ppermute: rank of perm", rank, rule) for rank in pair) for pair in pairs)
