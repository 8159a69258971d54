"""Exact messages whose terms are not rounded before they are added: what bfloat16 sums themselves cost.

    with sums_in_float32():
        program.step        # traced inside of it

A rank's term of a row-parallel product, and of the gradient before a column-parallel one, comes out of its matrix
product in float32, travels and is summed in float32, and only the sum is rounded to the activations' dtype. That is
what one device computes. The embedding needs nothing: of its terms all but one are zero. Twice the bytes are sent.

Only for exact codecs, whole sequences and one chain.

Dims: B batch, L length, D model, F the products' local output widths, V vocabulary, C tokens of one of n chunks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.models import blocks, overlap
from taco_jax.models.projections import add_bias
from taco_jax.nn import vocab_parallel
from taco_jax.tensor_parallel import copy_to_tp, reduce_from_tp, to_varying

WIDE = jnp.float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x, w_KN, x_dtype, dtype, precision):
    """x[..., K] @ w in `dtype`, of operands in w's dtype; x's gradient comes in `x_dtype`, not rounded before."""
    return jnp.matmul(x.astype(w_KN.dtype), w_KN, precision=precision, preferred_element_type=dtype)


def _product_fwd(x, w_KN, x_dtype, dtype, precision):
    return product(x, w_KN, x_dtype, dtype, precision), (x.astype(w_KN.dtype), w_KN)


def _product_bwd(x_dtype, dtype, precision, residuals, ct):
    x, w_KN = residuals
    ct = ct.astype(w_KN.dtype)
    dx = jnp.matmul(ct, w_KN.T, precision=precision, preferred_element_type=x_dtype)
    dw_KN = jnp.matmul(x.reshape(-1, x.shape[-1]).T, ct.reshape(-1, ct.shape[-1]), precision=precision)
    return dx, dw_KN


product.defvjp(_product_fwd, _product_bwd)


def column_input(x_BLD, par, state, site):
    """`projections.column_input` whose gradient is summed in float32: x is handed on as such, with x's values."""
    return copy_to_tp(x_BLD.astype(par.dtype).astype(WIDE), par.axis, site=site)


def column_parallel(x_BLD, denses, par):
    """`projections.column_parallel` of an x from `column_input`."""
    kernel_DF = jnp.concatenate([dense["kernel"].astype(par.dtype) for dense in denses], axis=1)
    y_BLF = product(x_BLD, kernel_DF, WIDE, par.dtype, par.precision)
    ends, end = [], 0
    for dense in denses[:-1]:
        end += dense["kernel"].shape[1]
        ends.append(end)
    return [add_bias(y, dense) for y, dense in zip(jnp.split(y_BLF, ends, axis=-1), denses, strict=True)]


def row_parallel(x_BLF, kernel_FD, error, par, state, site):
    """`projections.row_parallel`, summed in float32."""
    y_BLD = product(x_BLF.astype(par.dtype), kernel_FD.astype(par.dtype), par.dtype, WIDE, par.precision)
    return reduce_from_tp(y_BLD, par.axis, site=site).astype(par.dtype), None


def copy_to_head(x_BLD, axis, compression, scales, *, site):
    return copy_to_tp(x_BLD.astype(WIDE), axis, site=site)


def nll_sum(dtype):
    """`vocab._nll_sum` of an x in float32 whose values are those of `dtype`: its products are made in that."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
    def run(axis, vocab_size, precision, x_nCD, head_DV, targets_nC, weights_nC):
        return vocab_nll_sum(axis, vocab_size, precision, x_nCD.astype(dtype), head_DV, targets_nC, weights_nC)

    def forward(axis, vocab_size, precision, x_nCD, head_DV, targets_nC, weights_nC):
        cast_DV = head_DV.astype(dtype)

        def body(carry, operands):
            total, d_head_DV = carry
            x_CD, targets_C, weights_C = operands
            x_CD = x_CD.astype(dtype)
            nll, d_logits_CV = vocab_parallel._chunk(axis, vocab_size, precision, cast_DV, x_CD, targets_C, weights_C)
            d_logits_CV = d_logits_CV.astype(dtype)
            d_x_CD = jnp.matmul(d_logits_CV, cast_DV.T, precision=precision, preferred_element_type=WIDE)
            d_head_DV += vocab_parallel._product(x_CD.T, d_logits_CV, precision)
            return (total + nll, d_head_DV), d_x_CD

        start = jnp.zeros_like(weights_nC[0, 0]), jnp.zeros_like(head_DV, WIDE)
        (total, d_head_DV), d_x_nCD = lax.scan(body, start, (x_nCD, targets_nC, weights_nC))
        return total, (d_x_nCD, d_head_DV.astype(head_DV.dtype))

    def backward(axis, vocab_size, precision, gradients, ct):
        d_x_nCD, d_head_DV = gradients
        ct = to_varying(ct, axis)
        return d_x_nCD * ct, (d_head_DV * ct).astype(d_head_DV.dtype), None, None

    vocab_nll_sum = vocab_parallel._nll_sum
    run.defvjp(forward, backward)
    return run


@contextlib.contextmanager
def sums_in_float32(dtype=jnp.bfloat16) -> Iterator[None]:
    """Gives what is traced inside its exact messages in float32. dtype: that of the activations."""
    changes = (
        (overlap, "column_input", column_input), (overlap, "row_parallel", row_parallel),
        (blocks, "column_parallel", column_parallel),
        (vocab_parallel, "copy_to_tp", copy_to_head), (vocab_parallel, "_nll_sum", nll_sum(jnp.dtype(dtype))),
    )  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, function in changes:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
