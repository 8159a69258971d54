"""Products with a sum over the ranks: both in one kernel (`pallas_kernels/matmul_all_reduce`), or an input gradient's
sum beside the product that is the weight's gradient.

| function | forward | backward |
|---|---|---|
| product_psum | sum over the ranks of x @ w | dx = dy w^T, dw = x^T dy |
| copy_product | x @ w, x the same on every rank | dx = sum over the ranks of dy w^T, dw = x^T dy |

Megatron's g behind a row-parallel product and f before a column-parallel one, each joined with its product. In one
kernel a sum has two hops, the owner's own term unquantised, as two-shot has; owners have 64 rows each in turn, there
one piece each. Where the wires of dx's sum are copied (`peer_copy.py`), dw is computed during the copy, and the dw of a
row-parallel product before its dx: so no dw is left for a time at which nothing travels.

Dim letters: M rows, K inner dimension, N columns of the product that is summed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import matmul_all_reduce as kernels
from taco_jax.collectives import all_reduce, comm_log, nvlink, peer_copy
from taco_jax.collectives.api import copy, psum
from taco_jax.collectives.call import check_call
from taco_jax.collectives.manual_region import axis_tuple, to_varying
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.vjp import AMAX_NAME, OUTPUT_NAME, as_slot, start_all_reduce
from taco_jax.compat import barrier
from taco_jax.compression import dispatch


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part. transposed: w is [N, K]."""

    message: Message
    transposed: bool
    precision: Any = None

    def term(self, x, w):
        return jnp.matmul(x, w.T if self.transposed else w, precision=self.precision)


def product_psum(x, w, axis_name, *, compression, precision=None, site="psum", scales=None) -> jax.Array:
    """The sum over the ranks of x [..., K] @ w [K, N]: varying -> invarying, in one kernel where `takes` says so.

    Other arguments as of `psum`, which does the rest.
    """
    result = jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), x.dtype)
    call = check_call("product_psum", axis_name, compression, scales=scales)
    label = Label(site, "forward", comm_log.current_calls("forward"))
    found = Product(call.message(label, result.shape, _nbytes(result)), transposed=False, precision=precision)
    if not takes(found, x, w):
        # The backward message of the layer's other product is as large, and in the same direction.
        copied = call.message(Label(site, "backward"), result.shape, _nbytes(result)).link == "copy"
        product = (_weight_first if copied else _matmul)(x, w, precision)
        return psum(product, axis_name, compression=compression, site=site, scales=scales)
    exponents, slot = (None, None) if scales is None else (scales.exponents, scales.slot)
    return _psum(found, to_varying(x, axis_name), to_varying(w, axis_name), exponents, slot)


def copy_product(x, w, axis_name, *, compression, precision=None, site="copy", scales=None) -> jax.Array:
    """x [..., N] @ w [N, K] of an x that is the same on every rank; the sum that its gradient is in one kernel where
    `takes` says so. Other arguments as of `copy`."""
    call = check_call("copy_product", axis_name, compression, scales=scales)
    label = Label(site, "backward", comm_log.current_calls("backward"))
    found = Product(call.message(label, x.shape, _nbytes(x)), transposed=True, precision=precision)
    exponents, slot = (None, None) if scales is None else (scales.exponents, scales.slot)
    if x.dtype == w.dtype and copies(found.message, x):
        return _copy(found, x, to_varying(w, axis_name), exponents, slot)
    if not takes(found, jax.ShapeDtypeStruct((*x.shape[:-1], w.shape[1]), x.dtype), w):
        x = copy(x, axis_name, compression=compression, site=site, scales=scales)
        return jnp.matmul(x, w, precision=precision)
    return _copy(found, x, to_varying(w, axis_name), exponents, slot)


def copies(message: Message, x) -> bool:
    """Returns whether the sum of x's gradient is one of which wires are copied."""
    return not (message.codec.exact or message.ranks == 1) and peer_copy.takes(message, x)


def takes(product: Product, x, w) -> bool:
    """Returns whether x [..., K] @ w and its sum are one kernel; what is chosen is noted (`dispatch.record`)."""
    message, n = product.message, w.shape[0] if product.transposed else w.shape[1]
    m = x.size // x.shape[-1]
    if message.codec.exact or message.ranks == 1 or x.dtype != w.dtype or not message.compression.with_product:
        return False
    if not nvlink.takes(message, "all_reduce", jax.ShapeDtypeStruct((m * n,), x.dtype)):
        return False
    fmt = dispatch.to_format(message.codec)
    reason = kernels.why_unsupported(fmt, m, x.shape[-1], n, dtype=str(x.dtype), ranks=message.ranks)
    chosen = ("nvlink", "a product and its sum are one kernel") if reason is None else ("separate", reason)
    dispatch.note(message.codec, "product and sum", chosen)
    return reason is None


def _nbytes(x) -> int:
    return x.size * x.dtype.itemsize


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _psum(product: Product, x, w, exponents, slot):
    return _sum(product, x, w, None if exponents is None else exponents[0])[0]


def _psum_fwd(product, x, w, exponents, slot):
    y, measure = _sum(product, x, w, None if exponents is None else exponents[0])
    measure = None if slot is None else checkpoint_name(measure, AMAX_NAME)
    return checkpoint_name(y, OUTPUT_NAME), (x, w, measure, slot)


def _psum_bwd(product, residuals, ct):
    x, w, measure, slot = residuals
    dx, dw = jax.vjp(product.term, x, w)[1](to_varying(ct, product.message.axis))
    return dx, dw, None, None if slot is None else jnp.stack([as_slot(measure, slot[0]), jnp.zeros_like(slot[1])])


_psum.defvjp(_psum_fwd, _psum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _copy(product: Product, x, w, exponents, slot):
    return jnp.matmul(to_varying(x, product.message.axis), w, precision=product.precision)


def _copy_fwd(product, x, w, exponents, slot):
    return _copy(product, x, w, exponents, slot), (x, w, exponents, slot)


def _copy_bwd(product, residuals, ct):
    x, w, exponents, slot = residuals
    x, exponent = to_varying(x, product.message.axis), None if exponents is None else exponents[1]
    if product.message.link == "copy":
        dx, dw, measure = _sum_beside(product, x, w, ct, exponent)
    else:
        (dw,) = jax.vjp(lambda w: jnp.matmul(x, w, precision=product.precision), w)[1](ct)
        dx, measure = _sum(product, ct, w, exponent)
    return dx, dw, None, None if slot is None else jnp.stack([jnp.zeros_like(slot[0]), as_slot(measure, slot[1])])


_copy.defvjp(_copy_fwd, _copy_bwd)


def _matmul(x, w, precision):
    return jnp.matmul(x, w, precision=precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _weight_first(x, w, precision):
    """Returns x @ w, of whose gradients dw is computed first."""
    return _matmul(x, w, precision)


def _weight_first_bwd(precision, residuals, ct):
    dx, dw = jax.vjp(functools.partial(_matmul, precision=precision), *residuals)[1](ct)
    return barrier(dx, dw)


_weight_first.defvjp(lambda x, w, precision: (_matmul(x, w, precision), (x, w)), _weight_first_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_beside(product: Product, x, w, ct, exponent):
    """(the sum over the ranks of ct w^T, x^T ct, the sum's measure): the product during the sum's hop."""
    term, dw = _gradients(product, x, w, ct)
    message = start_all_reduce(product.message, term, exponent, None)
    dw = message.overlap_with(dw)
    dx, measure = message.done()
    return dx, dw, measure


def _gradients(product: Product, x, w, ct):
    return jax.vjp(functools.partial(_matmul, precision=product.precision), x, w)[1](ct)


def _sum_beside_fwd(product, x, w, ct, exponent):
    return _sum_beside(product, x, w, ct, exponent), (x, w, ct)


def _sum_beside_bwd(product, residuals, cts):
    dterm = to_varying(cts[0], product.message.axis)
    return *jax.vjp(functools.partial(_gradients, product), *residuals)[1]((dterm, cts[1])), None


_sum_beside.defvjp(_sum_beside_fwd, _sum_beside_bwd)


# Codes have no derivative: second derivatives take the exact ones of the product, as the first ones do.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(product: Product, x, w, exponent) -> tuple[jax.Array, jax.Array]:
    """(the sum over the ranks of the product, its measure)."""
    message, (axis,) = product.message, axis_tuple(product.message.axis)
    fmt = dispatch.to_format(message.codec)

    def fused(x, w, exponent):
        rows = x.reshape(-1, x.shape[-1])
        y, measure = kernels.matmul_all_reduce(fmt, rows, w, axis, exponent=exponent, transposed=product.transposed)
        return y.reshape(*x.shape[:-1], -1), measure

    def separate(x, w, exponent):
        return all_reduce.start(message, product.term(x, w), exponent, None).done()

    y, measure = nvlink.run(message, fused, separate, (x, w), exponent=exponent, to="invarying")
    in_two_hops = dataclasses.replace(message, algorithm="two_shot", why="that of the kernel with its product")
    in_two_hops.record("psum", y.size, y.dtype, [("custom-call", kernels.frame_bytes(fmt, y.size))] * 2)
    return y, measure


def _sum_fwd(product, x, w, exponent):
    return _sum(product, x, w, exponent), (x, w)


def _sum_bwd(product, residuals, ct):
    return *jax.vjp(product.term, *residuals)[1](to_varying(ct[0], product.message.axis)), None


_sum.defvjp(_sum_fwd, _sum_bwd)
