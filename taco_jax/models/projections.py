"""Column- and row-parallel products with a decoder's own parameters, cast at use, and the messages at their ends.

Row-parallel sums with error feedback (`taco_jax.collectives.error_feedback`) carry their error along the residual
stream:

    x_0, e_0 = embedding, 0        (y_i, e_i) = sum with feedback of (u_i, e_{i-1})        x_i = x_{i-1} + y_i

Whatever the depth, x is then off by the last sum's error, which `finish_stream` adds where it is worth a message.

The gradient of the stream has its errors too, of the sums of the column-parallel products' input gradients. Fed back
they travel in the other direction, as the cotangents of a carrier that has no values (`fed_column_input`). The sums
are then of gradients of x itself, each rank's own taken through the normalisation before it is sent:

    g_n, e_n = gradient, 0     (z_i, e_i) = sum with feedback of (J_norm(x_i)^T dh_i, e_{i+1})     g_i = g_{i+1} + z_i

Dims: B batch, L length, D model, F the products' local output widths, added up.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.compression.site_scales import SiteScales
from taco_jax.models.lora import Adapted
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import (
    column_product,
    copy_to_tp,
    copy_with_feedback,
    gather_from_sp,
    loses,
    reduce_from_tp,
    reduce_with_feedback,
    row_product,
    scatter_to_sp,
    to_varying,
)

Dense = Mapping[str, jax.Array]
"""{"kernel": [in, out], or an `Adapted`} and, if it has one, {"bias": [out]}; float32, local shards."""

State = Mapping[str, SiteScales | None]
"""Site name -> scales; for sites in layers with a leading dim of n_layers. A site that is absent runs uncalibrated."""


class FusedInput(NamedTuple):
    """The input of column-parallel products whose kernel sums the input's gradient: arguments of that kernel."""

    x_BLD: jax.Array
    scales: SiteScales | None
    site: str


def column_input(x_BLD: jax.Array, par: Parallel, state: State, site: str) -> jax.Array | FusedInput:
    """Returns the input of column-parallel products: x of all ranks' sequences.

    Sends one message in the backward pass. Under sequence parallelism one in the forward pass too.
    """
    arguments = x_BLD.astype(par.dtype), par.axis, par.compression(site), state.get(site)
    if fuses_product(par, site):
        return FusedInput(arguments[0], state.get(site), site)
    if par.sequence_dim is None:
        return copy_to_tp(*arguments, site=site)
    return gather_from_sp(*arguments, dim=par.sequence_dim, site=site)


def fed_column_input(x_BLD: jax.Array, carrier_BLD: jax.Array, par: Parallel, state: State,
             site: str) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (the residual stream, to be normalised for column-parallel products, the carrier).

    Sends one message in the backward pass, with the errors of the sums before it. The normalisation's parameters must
    vary over the axis (`decoder.use_replicated_params`).
    """
    arguments = par.axis, carrier_BLD, par.compression(site), state.get(site)
    return copy_with_feedback(x_BLD.astype(par.dtype), *arguments, site=site)


def fuses_product(par: Parallel, site: str) -> bool:
    """Returns whether a site's sums are to go into the kernels of products, or beside products."""
    compression = par.compression(site)
    if par.sequence_dim is not None or compression is None:
        return False
    # Adapters alone have no product beside which a sum could go.
    return compression.with_product or (compression.knows_products and not par.frozen)


def column_parallel(x_BLD: jax.Array | FusedInput, denses: Sequence[Dense], par: Parallel) -> list[jax.Array]:
    """Returns `[x @ d.kernel + d.bias for d in denses]` of a `column_input`, as one product.

    The kernels are joined while they are cast, which reads and writes them once either way; likewise the results'
    cotangents while they are computed.
    """
    kernels = [_frozen(dense["kernel"]) for dense in denses]
    kernel_DF = _joined_kernel(kernels, par)
    if isinstance(x_BLD, FusedInput):
        x, scales, site = x_BLD
        x, kernel_DF = _written_once(x, kernel_DF, par.frozen)
        y_BLF = column_product(
            x, kernel_DF, par.axis, par.compression(site), scales, precision=par.precision, site=site
        )
    else:
        x_BLD, kernel_DF = _written_once(x_BLD, kernel_DF, par.frozen)
        y_BLF = jnp.matmul(x_BLD, kernel_DF, precision=par.precision)
    ends = tuple(itertools.accumulate(kernel.shape[1] for kernel in kernels[:-1]))
    if any(isinstance(dense["kernel"], Adapted) for dense in denses):
        ys = _split(y_BLF, (), ends, (False,) * len(denses))
        ys = _add_adapters(x_BLD, ys, [dense["kernel"] for dense in denses], par)
        return [add_bias(y, dense) for y, dense in zip(ys, denses)]
    biases = [to_varying(d["bias"].astype(jnp.float32), varying_axes(y_BLF)) for d in denses if "bias" in d]
    return list(_split(y_BLF, tuple(biases), ends, tuple("bias" in d for d in denses)))


def _written_once(x_BLD: jax.Array, kernel_DF: jax.Array, frozen: bool) -> tuple[jax.Array, jax.Array]:
    """Returns both; where one is differentiated, the kernel as an array that all products of the two read.

    XLA would put the casts and the joining into each product, in the hope of a kernel that does both. cuBLAS is faster
    on GPUs, and then each product gets casts and a copy of its own: the recomputation and the input's gradient. Where
    nothing is differentiated there is one product, which may be small enough for such a kernel.
    """
    x_BLD, kernel_DF = _apart(x_BLD, kernel_DF)
    return x_BLD, lax.stop_gradient(kernel_DF) if frozen else kernel_DF


@jax.custom_vjp
def _apart(x_BLD: jax.Array, kernel_DF: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x_BLD, kernel_DF


_apart.defvjp(lambda x_BLD, kernel_DF: ((x_BLD, lax.optimization_barrier(kernel_DF)), None), lambda _, cts: cts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _split(y_BLF: jax.Array, biases: tuple[jax.Array, ...], ends: tuple[int, ...],
           biased: tuple[bool, ...]) -> tuple[jax.Array, ...]:  # fmt: skip
    """Returns y's parts along its last dim, which end at `ends` and with y, and `add_bias` of those that are biased.

    The parts' cotangents are computed right into the joined one, which the gradients of input, kernel and biases all
    read. Without the barrier XLA writes them apart, and joins them once more for each product (`_written_once`).
    """
    own = iter(biases)
    parts = zip(jnp.split(y_BLF, ends, axis=-1), biased)
    return tuple(add_bias(y, {"bias": next(own)} if has else {}) for y, has in parts)


def _split_backward(ends, biased, _, cts):
    ct_BLF = lax.optimization_barrier(jnp.concatenate(cts, axis=-1))
    if not any(biased):
        return ct_BLF, ()
    sums = jnp.split(jnp.sum(ct_BLF.astype(jnp.float32), axis=tuple(range(ct_BLF.ndim - 1))), ends)
    return ct_BLF, tuple(own for own, has in zip(sums, biased) if has)


_split.defvjp(lambda *arguments: (_split(*arguments), None), _split_backward)


_joined: contextvars.ContextVar[dict | None] = contextvars.ContextVar("taco_jax_joined_kernels", default=None)


@contextlib.contextmanager
def kernels_joined_once() -> Iterator[None]:
    """Inside the block each set of kernels is cast and joined once, however many products take it.

    XLA would put a copy of that into every product, and then make it for each of them. Kernels must be the same arrays,
    which those that are differentiated are not.
    """
    token = _joined.set({})
    try:
        yield
    finally:
        _joined.reset(token)


def _joined_kernel(kernels: list[jax.Array], par: Parallel) -> jax.Array:
    made, key = _joined.get(), tuple(map(id, kernels))
    if made is not None and key in made:
        return made[key][1]
    kernel_DF = jnp.concatenate([kernel.astype(par.dtype) for kernel in kernels], axis=1)
    if made is not None:
        kernel_DF = lax.optimization_barrier(kernel_DF)
        made[key] = kernels, kernel_DF  # the kernels too, so that no other array gets their ids
    return kernel_DF


def _frozen(kernel: jax.Array | Adapted) -> jax.Array:
    """Returns the kernel's own values. Those with an adapter are not differentiated, nor is what that needs kept."""
    return lax.stop_gradient(kernel.kernel) if isinstance(kernel, Adapted) else kernel


def _add_adapters(x_BLD: jax.Array, ys: Sequence[jax.Array], kernels: Sequence[Any], par: Parallel) -> list[jax.Array]:
    """Returns the products x @ kernel `ys` and what adapters add to them. All x @ A are one product."""
    adapted = [i for i, kernel in enumerate(kernels) if isinstance(kernel, Adapted)]
    if not adapted:
        return list(ys)
    if isinstance(x_BLD, FusedInput):
        raise ValueError("with_product: its kernel knows no adapters; leave it out")
    product = lambda x, w: jnp.matmul(x, w.astype(par.dtype), precision=par.precision)
    ranks = [kernels[i].a.shape[1] for i in adapted]
    low_BLR = product(x_BLD, jnp.concatenate([kernels[i].a for i in adapted], axis=1)) * par.adapter_scale
    ys, parts = list(ys), jnp.split(low_BLR, [sum(ranks[:i]) for i in range(1, len(ranks))], axis=-1)
    for i, part_BLR in zip(adapted, parts):
        ys[i] += product(part_BLR, kernels[i].b)
    return ys


def row_partial(x_BLF: jax.Array, kernel_FD: jax.Array | Adapted, par: Parallel) -> jax.Array:
    """Returns this rank's term of the row-parallel product `x @ kernel`, which `reduce_partials` sums."""
    x_BLF = x_BLF.astype(par.dtype)
    y_BLD = jnp.matmul(x_BLF, _frozen(kernel_FD).astype(par.dtype), precision=par.precision)
    return _add_adapters(x_BLF, [y_BLD], [kernel_FD], par)[0]


def row_parallel(x_BLF: jax.Array, kernel_FD: jax.Array | Adapted, error: jax.Array | None, par: Parallel, state: State,
            site: str) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Returns (`reduce_partials(row_partial(x, kernel))`, None), in one kernel where that is asked for and can be.

    With an error that was carried here, returns `reduce_partials_with_feedback` of both.
    """
    if error is not None:
        return reduce_partials_with_feedback(row_partial(x_BLF, kernel_FD, par), error, par, state, site)
    if par.sequence_dim is not None or isinstance(kernel_FD, Adapted):
        return reduce_partials(row_partial(x_BLF, kernel_FD, par), par, state, site), None
    operands = x_BLF.astype(par.dtype), kernel_FD.astype(par.dtype)
    arguments = par.axis, par.compression(site), state.get(site)
    return row_product(*operands, *arguments, precision=par.precision, site=site), None


def reduce_partials(y_BLD: jax.Array, par: Parallel, state: State, site: str) -> jax.Array:
    """Returns the sum of the ranks' terms.

    Sends one message in the forward pass. Under sequence parallelism one in the backward pass too.
    """
    arguments = y_BLD, par.axis, par.compression(site), state.get(site)
    if par.sequence_dim is None:
        return reduce_from_tp(*arguments, site=site)
    return scatter_to_sp(*arguments, dim=par.sequence_dim, site=site)


def reduce_partials_with_feedback(y_BLD: jax.Array, error_BLD: jax.Array, par: Parallel, state: State,
             site: str) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Returns (the sum of the ranks' terms and errors, the errors that it leaves), for whole sequences."""
    return reduce_with_feedback(y_BLD, par.axis, error_BLD, par.compression(site), state.get(site), site=site)


def add_bias(y: jax.Array, dense: Dense) -> jax.Array:
    """Returns `y + dense.bias`, or y without one. Float32 additions sum the bias's gradient in float32 too."""
    return (y.astype(jnp.float32) + dense["bias"]).astype(y.dtype) if "bias" in dense else y


class ResidualStream(NamedTuple):
    """x_BLD and this rank's error_BLD in par.dtype, None where no sum leaves one.

    carrier_BLD: zeros, whose cotangents are the errors of the gradients' sums; None where these are not fed back.
    """

    x_BLD: jax.Array
    error_BLD: jax.Array | None = None
    carrier_BLD: jax.Array | None = None


def init_stream(
    x_BLD: jax.Array, par: Parallel, row_sites: Iterable[str], column_sites: Iterable[str] = ()
) -> ResidualStream:
    """Returns the stream before the sums of row_sites and the gradients' of column_sites, of x's shape in par.dtype."""
    zeros = lambda: to_varying(jnp.zeros(x_BLD.shape, par.dtype), varying_axes(x_BLD) | {par.axis})
    lost = any(loses(x_BLD.shape, par.dtype, par.axis, par.compression(site)) for site in row_sites)
    fed = any(map(par.feeds_gradients_back, column_sites))
    return ResidualStream(x_BLD, zeros() if lost else None, zeros() if fed else None)


def finish_stream(stream: ResidualStream, par: Parallel, site: str) -> jax.Array:
    """Returns x and what the sums before it lost: one exact message of x's size, none where there is no error."""
    x_BLD, error_BLD, _ = stream
    if error_BLD is None:
        return x_BLD
    comm_log.exact(site, "forward", "psum", par.axis, error_BLD, kind="activation")
    return (x_BLD.astype(jnp.float32) + lax.psum(error_BLD, par.axis)).astype(x_BLD.dtype)
