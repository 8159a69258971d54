"""Vocabulary-parallel embedding, output head and cross-entropy: each rank of the axis holds a share of the vocabulary.

All functions run inside a shard_map that is manual over all mesh axes (check_vma=True) and take local shards.
Dims: B batch, L length, D model, C tokens of one chunk, n chunks, P ranks, V vocabulary: local, the padded one over tp.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compat import varying_axes
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.tensor_parallel import check_region, copy_to_tp, gather_from_sp, reduce_from_tp, scatter_to_sp, to_varying

TILE = 128
"""Each rank's share of the vocabulary is a multiple of this, so that its matrix products tile well."""

CHUNK = 2048
"""Default tokens per chunk of the loss: few enough for memory, enough to pay for one pass over d head a chunk."""

LOGPROBS_CHUNK = 128
"""Default tokens per chunk of `logprobs`: their logits are 77 MB at a vocabulary of 150,000 on one rank."""


def pad_vocab(vocab_size: int, tp: int) -> int:
    """Rows of the tables of `vocab_size` ids over `tp` ranks: the next multiple of 128 * tp."""
    return math.ceil(vocab_size / (TILE * tp)) * TILE * tp


def embed(
    table_VD: jax.Array,
    tokens_BL: jax.Array,
    axis: str,
    compression: Compression | None = None,
    scales: SiteScales | None = None,
    *,
    vocab_size: int | None = None,
    sequence_dim: int | None = None,
    dtype=None,
    site: str = "embed",
) -> jax.Array:
    """`table[tokens]` of a table whose rows are spread over the axis: x_BLD, or x_B(L/tp)D with sequence_dim=1.

    Every rank looks up the ids that it holds, zero elsewhere; the sum over the axis is one message of B * L * D values
    in `dtype` (default: the table's). The table's gradient is summed in the table's own dtype and needs no message.

    Args:
      table_VD: local rows, `pad_vocab(vocab_size, tp) / tp` of them.
      tokens_BL: integer ids, the same on all ranks of the axis.
      vocab_size: if given, an id outside [0, vocab_size) gives NaN (jit cannot raise) where it would else give zeros.
      sequence_dim: 1 to return the rank's part of the sequence (sequence parallelism), None for the whole.
    """
    check_region(axis, "embed")
    rows = table_VD.shape[0]
    local_BL = tokens_BL - lax.axis_index(axis) * rows
    # An id of another rank becomes an index past the end: read as 0 and dropped by the gradient's scatter, where a
    # stand-in row would have most of the batch add zeros to it one after the other.
    local_BL = jnp.where((local_BL >= 0) & (local_BL < rows), local_BL, rows)
    x_BLD = table_VD.at[local_BL].get(mode="fill", fill_value=0).astype(dtype or table_VD.dtype)
    if vocab_size is not None:
        known_BL = (tokens_BL >= 0) & (tokens_BL < vocab_size)
        x_BLD = jnp.where(known_BL[..., None], x_BLD, jnp.nan)
    if sequence_dim is None:
        return reduce_from_tp(x_BLD, axis, compression, scales, site=site)
    return scatter_to_sp(x_BLD, axis, compression, scales, dim=sequence_dim, site=site)


def cross_entropy(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    axis: str,
    compression: Compression | None = None,
    scales: SiteScales | None = None,
    *,
    vocab_size: int,
    chunk: int | None = None,
    sequence_dim: int | None = None,
    precision=None,
    softcap: float | None = None,
    site: str = "head",
) -> tuple[jax.Array, jax.Array]:
    """`sum(weights * (logsumexp(x @ head) - (x @ head)[target]))` and `sum(weights)`, both float32 scalars.

    The logits of `chunk` tokens (None: CHUNK) and a rank's share of the vocabulary exist at once, float32[chunk, V],
    never more, in either pass: where a gradient is wanted it is taken chunk by chunk in the forward pass (dx in x's
    dtype, d head summed in float32), so the logits are computed once. Padding beyond `vocab_size` is masked.

    Messages: x to all ranks (backward, or with sequence_dim also forward: site `site`); per chunk one exact all_gather
    of each rank's maximum, sum and target logit, 12 bytes a token and rank (site `site`/softmax).

    Args:
      x_BLD: the model's output, the same on all ranks, or the rank's part of dim `sequence_dim` of it. Of
        a whole one that varies over the axis already the caller sums the gradient.
      head_DV: local columns, cast to x's dtype for the product; its gradient has its own dtype.
      targets_BL: integer ids of the whole sequence. One outside [0, vocab_size) with a weight makes the sum NaN.
      weights_BL: float; 0 leaves a token out whatever its target. No gradient flows into it.
      softcap: c of logits that are `c tanh(x @ head / c)`; None for plain ones.
    """
    check_region(axis, "cross_entropy")
    if sequence_dim is None and axis not in varying_axes(x_BLD):
        x_BLD = copy_to_tp(x_BLD, axis, compression, scales, site=site)
    elif sequence_dim is not None:
        x_BLD = gather_from_sp(x_BLD, axis, compression, scales, dim=sequence_dim, site=site)
    if x_BLD.shape[:-1] != targets_BL.shape or targets_BL.shape != weights_BL.shape:
        raise ValueError(
            f"cross_entropy: x {x_BLD.shape} (gathered), targets {targets_BL.shape} and weights {weights_BL.shape} "
            "must agree in all dims but x's last"
        )
    tokens = targets_BL.size
    chunks = math.ceil(tokens / (chunk or CHUNK))
    chunk = math.ceil(tokens / chunks)  # even chunks, so that little is padded
    padded = chunks * chunk

    def cut(a):
        a = a.reshape(tokens, *a.shape[targets_BL.ndim :])
        a = jnp.pad(a, [(0, padded - tokens)] + [(0, 0)] * (a.ndim - 1)) if padded > tokens else a
        return a.reshape(chunks, chunk, *a.shape[1:])

    weights_BL = lax.stop_gradient(weights_BL.astype(jnp.float32))
    with comm_log.repeat(chunks):
        stats = jax.ShapeDtypeStruct((lax.axis_size(axis), 3, chunk), jnp.float32)
        comm_log.exact(f"{site}/softmax", "forward", "all_gather", axis, stats)
    operands = _vary_alike(cut(x_BLD), head_DV, cut(targets_BL), cut(weights_BL), axis=axis)
    return _nll_sum(axis, vocab_size, precision, softcap, *operands), jnp.sum(weights_BL)


def logits(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    axis: str,
    compression: Compression | None = None,
    scales: SiteScales | None = None,
    *,
    vocab_size: int,
    sequence_dim: int | None = None,
    precision=None,
    softcap: float | None = None,
    site: str = "head",
) -> jax.Array:
    """`x @ head` of all tokens and ids, float32[B, L, vocab_size] on every rank: for tests and sampling.

    softcap: as in `cross_entropy`. Gathers the logits exactly (site `site`/logits).
    """
    check_region(axis, "logits")
    if sequence_dim is None and axis not in varying_axes(x_BLD):
        x_BLD = copy_to_tp(x_BLD, axis, compression, scales, site=site)
    elif sequence_dim is not None:
        x_BLD = gather_from_sp(x_BLD, axis, compression, scales, dim=sequence_dim, site=site)
    logits_BLV = _capped(_product(x_BLD, head_DV.astype(x_BLD.dtype), precision), softcap)
    whole = lax.all_gather(logits_BLV, axis, axis=logits_BLV.ndim - 1, tiled=True, to="invarying")
    comm_log.exact(f"{site}/logits", "forward", "all_gather", axis, whole)
    return whole[..., :vocab_size]


def score(
    x_BLD: jax.Array,
    head_DV: jax.Array,
    targets_BL: jax.Array,
    axis: str,
    *,
    vocab_size: int,
    precision=None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(negative log-likelihood float32[B, L] of every target, the most likely id int32[B, L]): for evaluation.

    Exact, without a derivative, for whole sequences; the logits of one sequence exist at once. Arguments as of
    `cross_entropy`.
    """
    check_region(axis, "score")
    head_DV = head_DV.astype(x_BLD.dtype)

    def sequence(operands):
        x_LD, targets_L = operands
        logits_LV = _capped(_product(to_varying(x_LD, axis), head_DV, precision), softcap)
        logits_LV, _, _, nll_L = _log_likelihood(axis, vocab_size, logits_LV, targets_L)
        best_L = jnp.argmax(logits_LV, axis=1) + lax.axis_index(axis) * logits_LV.shape[1]
        peaks_PL = lax.all_gather(jnp.max(logits_LV, axis=1), axis, to="invarying")
        best_PL = lax.all_gather(best_L, axis, to="invarying")
        return nll_L, jnp.take_along_axis(best_PL, jnp.argmax(peaks_PL, axis=0)[None], axis=0)[0].astype(jnp.int32)

    return lax.map(sequence, (x_BLD, targets_BL))


def logprobs(
    x_LD: jax.Array,
    head_DV: jax.Array,
    targets_L: jax.Array,
    axis: str,
    *,
    vocab_size: int,
    top: int,
    chunk: int | None = None,
    precision=None,
    softcap: float | None = None,
    site: str = "head",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(log-probabilities float32[L] of all targets, float32[L, K] of the K = `top` most likely ids, these int32[L, K]).

    Exact, without a derivative. The logits of `chunk` tokens (None: LOGPROBS_CHUNK) and a rank's share of the
    vocabulary exist at once. The most likely id is first, of equal ones the smallest; a target's value is bit for bit
    the one that it has among the most likely. Each rank sends its own K best of every token (site `site`/logprobs).
    `top` is at most TILE; places beyond `vocab_size` are -inf.

    Args:
      x_LD: the model's output, the same on all ranks.
      targets_L: integer ids; one outside [0, vocab_size) gives NaN.
      softcap: as in `cross_entropy`.
    """
    check_region(axis, "logprobs")
    head_DV = head_DV.astype(x_LD.dtype)
    tokens = len(targets_L)
    chunks = math.ceil(tokens / (chunk or LOGPROBS_CHUNK))
    chunk = math.ceil(tokens / chunks)

    def cut(a):
        return jnp.pad(a, [(0, chunks * chunk - tokens)] + [(0, 0)] * (a.ndim - 1)).reshape(chunks, chunk, *a.shape[1:])

    def one(operands):
        x_CD, targets_C = operands
        logits_CV = _capped(_product(to_varying(x_CD, axis), head_DV, precision), softcap)
        logits_CV, _, lse_C, nll_C = _log_likelihood(axis, vocab_size, logits_CV, targets_C)
        own_CK, at_CK = lax.top_k(logits_CV, top)
        own_ids_CK = at_CK + lax.axis_index(axis) * logits_CV.shape[1]
        # In the order of the ranks, so of the ids: top_k takes the first of equal ones.
        values_CQ = lax.all_gather(own_CK, axis, axis=1, tiled=True, to="invarying")
        ids_CQ = lax.all_gather(own_ids_CK, axis, axis=1, tiled=True, to="invarying")
        best_CK, at_CK = lax.top_k(values_CQ, top)
        ids_CK = jnp.take_along_axis(ids_CQ, at_CK, axis=1)
        return -nll_C, best_CK - lse_C[:, None], ids_CK.astype(jnp.int32)

    with comm_log.repeat(chunks):
        sent = jax.ShapeDtypeStruct((lax.axis_size(axis), chunk, 3 + 2 * top), jnp.float32)
        comm_log.exact(f"{site}/logprobs", "forward", "all_gather", axis, sent)
    results = lax.map(one, (cut(x_LD), cut(targets_L)))
    return tuple(a.reshape(chunks * chunk, *a.shape[2:])[:tokens] for a in results)


def _product(x: jax.Array, head_DV: jax.Array, precision) -> jax.Array:
    return jnp.matmul(x, head_DV, precision=precision, preferred_element_type=jnp.float32)


def _capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _vary_alike(x, head, targets, weights, *, axis):
    """The operands with the varying axes that a sum over tokens needs. A custom_vjp must return exactly its inputs'
    types, so what is missing is added outside of it, where autodiff turns it into a psum of the gradient."""
    tokens_axes = varying_axes(x) | varying_axes(head) | varying_axes(targets) | varying_axes(weights) | {axis}
    return (
        to_varying(x, tokens_axes),
        to_varying(head, tokens_axes),
        to_varying(targets, tokens_axes - {axis}),
        to_varying(weights, tokens_axes - {axis}),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _nll_sum(axis, vocab_size, precision, softcap, x_nCD, head_DV, targets_nC, weights_nC):
    """Sum over all n chunks; invarying over the axis."""
    head_DV = head_DV.astype(x_nCD.dtype)

    def body(total, operands):
        nll, _ = _chunk(axis, vocab_size, precision, head_DV, *operands, softcap=softcap)
        return total + nll, None

    zero = jnp.zeros_like(weights_nC[0, 0])
    return lax.scan(body, zero, (x_nCD, targets_nC, weights_nC))[0]


def _nll_sum_forward(axis, vocab_size, precision, softcap, x_nCD, head_DV, targets_nC, weights_nC):
    """Also the gradients for a cotangent of 1. Taking them here saves computing the logits a second time."""
    cast_DV = head_DV.astype(x_nCD.dtype)

    def body(carry, operands):
        total, d_head_DV = carry
        nll, d_logits_CV = _chunk(axis, vocab_size, precision, cast_DV, *operands, softcap=softcap)
        d_logits_CV = d_logits_CV.astype(x_nCD.dtype)
        d_x_CD = jnp.matmul(d_logits_CV, cast_DV.T, precision=precision)
        d_head_DV += _product(operands[0].T, d_logits_CV, precision)
        return (total + nll, d_head_DV), d_x_CD

    start = jnp.zeros_like(weights_nC[0, 0]), jnp.zeros_like(head_DV, jnp.float32)
    (total, d_head_DV), d_x_nCD = lax.scan(body, start, (x_nCD, targets_nC, weights_nC))
    return total, (d_x_nCD, d_head_DV.astype(head_DV.dtype))


def _nll_sum_backward(axis, vocab_size, precision, softcap, gradients, ct):
    d_x_nCD, d_head_DV = gradients
    ct = to_varying(ct, axis)
    return (d_x_nCD * ct).astype(d_x_nCD.dtype), (d_head_DV * ct).astype(d_head_DV.dtype), None, None


_nll_sum.defvjp(_nll_sum_forward, _nll_sum_backward)


def _chunk(axis, vocab_size, precision, head_DV, x_CD, targets_C, weights_C, softcap):
    """(sum of weighted nll, its gradient with respect to the local logits as float32[C, V]) of one chunk."""
    own_CV = _capped(_product(x_CD, head_DV, precision), softcap)
    logits_CV, hit_CV, lse_C, nll_C = _log_likelihood(axis, vocab_size, own_CV, targets_C)
    nll = jnp.sum(jnp.where(weights_C == 0, 0.0, weights_C * nll_C))

    softmax_CV = jnp.exp(logits_CV - lse_C[:, None])
    slope_CV = 1.0 if softcap is None else 1 - jnp.square(own_CV / softcap)
    return nll, (softmax_CV - hit_CV) * weights_C[:, None] * slope_CV


def _log_likelihood(axis, vocab_size, logits_CV, targets_C):
    """(logits with the padding masked, where the target is, logsumexp over all ranks, nll) of local logits."""
    columns = logits_CV.shape[1]
    start = lax.axis_index(axis) * columns
    ids_V = start + jnp.arange(columns, dtype=jnp.int32)
    logits_CV = jnp.where(ids_V < vocab_size, logits_CV, -jnp.inf)
    hit_CV = ids_V == targets_C[:, None]
    # A rank that holds nothing but padding has the maximum -inf: subtract 0 there, and its sum is 0, not NaN.
    own_peak_C = jnp.max(logits_CV, axis=1)
    sum_C = jnp.sum(jnp.exp(logits_CV - jnp.where(own_peak_C == -jnp.inf, 0.0, own_peak_C)[:, None]), axis=1)
    target_C = jnp.sum(jnp.where(hit_CV, logits_CV, 0.0), axis=1)

    # One message a chunk; all ranks then add the same terms in the same order.
    stats = lax.all_gather(jnp.stack([own_peak_C, sum_C, target_C]), axis, to="invarying")
    peak_PC, sum_PC, target_PC = stats[:, 0], stats[:, 1], stats[:, 2]
    peak_C = jnp.max(peak_PC, axis=0)
    lse_C = peak_C + jnp.log(jnp.sum(sum_PC * jnp.exp(peak_PC - peak_C), axis=0))
    known_C = (targets_C >= 0) & (targets_C < vocab_size)
    nll_C = jnp.where(known_C, lse_C - jnp.sum(target_PC, axis=0), jnp.nan)
    return logits_CV, hit_CV, lse_C, nll_C
