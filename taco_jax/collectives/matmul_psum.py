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
from taco_jax.collectives.manual_region import axis_tuple, same_on_all_ranks, to_varying
from taco_jax.collectives.message import Label, Message
from taco_jax.collectives.vjp import AMAX_NAME, OUTPUT_NAME, as_slot, start_all_reduce
from taco_jax.compat import barrier
from taco_jax.compression import dispatch
from taco_jax.compression.site_scales import merge_uses

PIECE_ROWS = 256
MIN_PIECES_BYTES = 32 << 20
"""Bytes of a product from which on its sum is copied in two pieces."""
MIN_PIECES_INNER = 4096
"""Its inner dimension, likewise: a quarter of the product at 650 TFLOP/s, beside three quarters of an 8-bit wire at 380
GB/s (both measured on H200s), lasts as long from 2,600 on."""


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part. transposed: w is [N, K]."""

    message: Message
    transposed: bool
    precision: Any = None

    @property
    def weight_first(self) -> bool:
        """Returns whether gradients' sums are copied: no dw may be left for a time at which nothing travels."""
        # The backward message of the layer's other product is as large, and in the same direction.
        return dataclasses.replace(self.message, label=Label(direction="backward")).link == "copy"

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
    in_pieces = x.dtype == w.dtype and copies(found.message, result) and first_rows(result, w.shape[0]) is not None
    if not in_pieces and not takes(found, x, w):
        product = (_weight_first if found.weight_first else _matmul)(x, w, precision)
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
    dx, dw = barrier(dx, dw) if product.weight_first else (dx, dw)
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
    if message.link == "copy":
        return _sum_in_pieces(product, x, w, exponent)
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


def _sum_in_pieces(product: Product, x, w, exponent) -> tuple[jax.Array, jax.Array]:
    """`_sum` whose wires are copied in two pieces of rows: the first beside the second's product, the second beside the
    sum of the first's wires. The bits are those of one piece."""
    message, rows_MK = product.message, x.reshape(-1, x.shape[-1])
    (axis,) = axis_tuple(message.axis)
    m = first_rows(jax.ShapeDtypeStruct((rows_MK.shape[0], w.shape[1]), x.dtype), w.shape[0])
    start = functools.partial(peer_copy.start, message, exponent=exponent, key=None, record=False)
    # Else XLA computes all rows before the first product, and the second's once more.
    (head_MK,), (tail_MK,) = barrier(rows_MK[:m]), barrier(rows_MK[m:])
    first = start(product.term(head_MK, w))
    second = start(first.overlap_with(product.term(tail_MK, w)))
    y, measure = first.done()
    # Typed as the wires are: values that vary over different axes cannot be ordered in every jax.
    y = same_on_all_ranks(second.overlap_with(to_varying(y, axis)), axis)
    z, other = second.done()
    peer_copy.record_pieces(message, jax.ShapeDtypeStruct((y.size + z.size,), x.dtype), [y.size, z.size])
    return jnp.concatenate([y, z]).reshape(*x.shape[:-1], -1), merge_uses(jnp.stack([measure, other]))


def first_rows(y, inner: int) -> int | None:
    """Returns how many rows of a product y [..., N] are in the first of two pieces; None where it stays whole.

    inner: K, on which it depends whether the second piece's product lasts until the first's wires are through.

    Tiles of 256 rows and 128 columns go to 132 multiprocessors in waves (H200). Of all splits that need no more waves
    than the whole product it is the one whose second piece, the one that travels beside least, is smallest, but for
    pieces below a quarter: beside their product the first one's wires would not be through.
    """
    rows, columns = y.size // y.shape[-1], y.shape[-1]
    blocks, waves = rows // PIECE_ROWS, lambda blocks: -(-blocks * -(-columns // 128) // 132)
    if rows % PIECE_ROWS or _nbytes(y) < MIN_PIECES_BYTES or inner < MIN_PIECES_INNER:
        return None
    fitting = [n for n in range(blocks // 2, blocks * 3 // 4 + 1) if waves(n) + waves(blocks - n) <= waves(blocks)]
    return PIECE_ROWS * max(fitting, default=blocks * 3 // 4)


def _sum_fwd(product, x, w, exponent):
    return _sum(product, x, w, exponent), (x, w)


def _sum_bwd(product, residuals, ct):
    return *jax.vjp(product.term, *residuals)[1](to_varying(ct[0], product.message.axis)), None


_sum.defvjp(_sum_fwd, _sum_bwd)
