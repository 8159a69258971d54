"""Vocabulary-parallel embedding, cross-entropy and logits against plain jnp on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import comm_log
from taco_jax.nn import vocab_parallel

B, L, D, V = 2, 12, 16, 200


def _inputs(tp: int, seed: int = 0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    padded = vocab_parallel.pad_vocab(V, tp)
    head = rng.normal(size=(D, padded)).astype(np.float32)  # the padding is not zero: it must be masked
    x = rng.normal(size=(B, L, D)).astype(dtype)
    targets = rng.integers(0, V, (B, L), np.int32)
    weights = (rng.random((B, L)) < 0.8).astype(np.float32)
    return x, head, targets, weights


@functools.partial(jax.jit, static_argnames="softcap")
def _plain_nll(x, head, targets, weights, softcap=None):
    logits = jnp.matmul(x, head[:, :V].astype(x.dtype), preferred_element_type=jnp.float32)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return jnp.sum(nll * weights)


def _parallel_nll(tp: int, *, sequence_parallel: bool = False, chunk: int | None = 10, dp: int = 1, **options):
    """jitted (x, head, targets, weights) -> (nll, weight sum, (dx, dhead)), global arrays."""
    mesh = make_mesh(dp=dp, tp=tp)
    x_spec = P("dp", "tp") if sequence_parallel else P("dp")

    def step(x, head, targets, weights):
        head = lax.pcast(head, "dp", to="varying")

        def loss(x, head):
            dim = 1 if sequence_parallel else None
            return vocab_parallel.cross_entropy(
                x, head, targets, weights, "tp", vocab_size=V, chunk=chunk, sequence_dim=dim, **options
            )

        (nll, count), (d_x, d_head) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, head)
        return lax.psum(nll, "dp"), lax.psum(count, "dp"), (d_x, lax.psum(d_head, "dp"))

    specs = (x_spec, P(None, "tp"), P("dp"), P("dp"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), P(), (x_spec, P(None, "tp")))))


def test_softcap_equals_plain():
    arrays, plain = _inputs(4), functools.partial(_plain_nll, softcap=2.0)
    want, gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(*arrays)
    got, _, found = _parallel_nll(4, softcap=2.0)(*arrays)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for ours, theirs in zip(found, gradients):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_pad_vocab():
    assert vocab_parallel.pad_vocab(50_257, 1) == 50_304
    assert vocab_parallel.pad_vocab(50_257, 2) == vocab_parallel.pad_vocab(50_257, 1) + 128 == 50_432
    assert vocab_parallel.pad_vocab(50_257, 4) == 50_688
    assert vocab_parallel.pad_vocab(152_064, 4) == 152_064
    assert vocab_parallel.pad_vocab(256, 8) == 1024


@pytest.mark.parametrize(
    "tp, sequence_parallel, chunk, dp",
    [(1, False, None, 1), (2, False, 24, 1), (4, True, 10, 2), (8, False, 5, 1), (2, True, 7, 1)],
)
def test_cross_entropy_equals_plain(tp, sequence_parallel, chunk, dp):
    # At tp 8 the last six ranks hold nothing but padding.
    arrays = _inputs(tp)
    want, (want_dx, want_dhead) = jax.jit(jax.value_and_grad(_plain_nll, argnums=(0, 1)))(*arrays)
    got, count, (dx, dhead) = _parallel_nll(tp, sequence_parallel=sequence_parallel, chunk=chunk, dp=dp)(*arrays)
    assert count == arrays[3].sum()
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(dx, want_dx, atol=2e-6)
    np.testing.assert_allclose(dhead, want_dhead, atol=5e-6)
    assert not np.any(np.asarray(dhead)[:, V:])


def test_cross_entropy_of_huge_logits_is_finite():
    x, head, targets, weights = _inputs(4)
    x, head = x * 300, -np.abs(head)
    x = np.abs(x)  # all real logits are far below 0, where the padding would win if it counted as 0
    got, _, (dx, dhead) = _parallel_nll(4)(x, head, targets, weights)
    np.testing.assert_allclose(got, _plain_nll(x, head, targets, weights), rtol=1e-5)
    assert np.isfinite(dx).all() and np.isfinite(dhead).all()


def test_cross_entropy_in_bfloat16():
    x, head, targets, weights = _inputs(4, dtype=jnp.bfloat16)
    want, (want_dx, want_dhead) = jax.jit(jax.value_and_grad(_plain_nll, argnums=(0, 1)))(x, head, targets, weights)
    got, _, (dx, dhead) = _parallel_nll(4)(x, head, targets, weights)
    assert dx.dtype == jnp.bfloat16 and dhead.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.linalg.norm(np.float32(dx) - np.float32(want_dx)) < 0.02 * np.linalg.norm(np.float32(want_dx))
    assert np.linalg.norm(dhead - want_dhead) < 0.02 * np.linalg.norm(want_dhead)


def test_unknown_target_is_loud_and_weight_zero_hides_it():
    x, head, targets, weights = _inputs(2)
    weights[:] = 1
    targets[0, 0] = V  # a row of the padding
    step = _parallel_nll(2)
    assert np.isnan(step(x, head, targets, weights)[0])
    weights[0, 0] = 0
    nll, _, (dx, _) = step(x, head, targets, weights)
    assert np.isfinite(nll) and np.isfinite(dx).all() and not np.any(np.asarray(dx)[0, 0])


def test_logits_never_exist_at_once():
    tokens, vocabulary, width, chunk, tp = 512, 2048, 8, 32, 4
    mesh = make_mesh(tp=tp)

    def step(x, head, targets, weights):
        def loss(x, head):
            return vocab_parallel.cross_entropy(x, head, targets, weights, "tp", vocab_size=vocabulary, chunk=chunk)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(x, head)

    specs = (P(), P(None, "tp"), P(), P())
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), P(None, "tp")))))
    x, head = jnp.zeros((1, tokens, width)), jnp.zeros((width, vocabulary))
    arguments = (x, head, jnp.zeros((1, tokens), jnp.int32), jnp.zeros((1, tokens)))
    with comm_log.record() as table:
        compiled = mapped.lower(*arguments).compile()
    local = vocabulary // tp
    sizes = {np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())}
    assert chunk * local in sizes
    assert max(sizes) <= max(chunk * local, tokens * width, width * local) < tokens * local
    # Scratch: a few copies of one chunk's logits and of the gradients, on each of the devices.
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * tokens * local
    (row,) = [row for row in table.rows() if row.site == "head/softmax"]
    assert (row.op, row.elements, row.calls) == ("all_gather", 3 * chunk * tp, tokens // chunk)


@pytest.mark.parametrize("tp, sequence_parallel, dp", [(1, False, 1), (2, True, 2), (4, False, 2), (8, False, 1)])
def test_embed_equals_plain(tp, sequence_parallel, dp):
    mesh = make_mesh(dp=dp, tp=tp)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(vocab_parallel.pad_vocab(V, tp), D)).astype(np.float32)
    tokens = rng.integers(0, V, (B, L), np.int32)
    factor = rng.normal(size=(B, L, D)).astype(np.float32)
    spec = P("dp", "tp") if sequence_parallel else P("dp")

    def step(table, tokens, factor):
        dim = 1 if sequence_parallel else None
        embed = lambda table: vocab_parallel.embed(table, tokens, "tp", vocab_size=V, sequence_dim=dim)
        x, pull = jax.vjp(embed, lax.pcast(table, "dp", to="varying"))
        return x, lax.psum(pull(factor)[0], "dp")

    specs = (P("tp"), P("dp"), spec)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(spec, P("tp")))
    x, gradient = jax.jit(mapped)(table, tokens, factor)
    np.testing.assert_array_equal(x, table[tokens])
    want = np.zeros_like(table)
    np.add.at(want, tokens, factor)
    np.testing.assert_allclose(gradient, want, atol=1e-6)


@pytest.mark.parametrize("token", [-1, V, 10_000])
def test_embed_of_unknown_token_is_nan(token):
    mesh = make_mesh(tp=2)
    embed = lambda table, tokens: vocab_parallel.embed(table, tokens, "tp", vocab_size=V)
    run = jax.jit(jax.shard_map(embed, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()))
    x = run(np.ones((256, D), np.float32), np.array([[3, token]], np.int32))
    assert np.isfinite(x[0, 0]).all() and np.isnan(x[0, 1]).all()


def test_logits_equal_plain():
    x, head, _, _ = _inputs(4)
    run = lambda x, head: vocab_parallel.logits(x, head, "tp", vocab_size=V)
    mapped = jax.shard_map(run, mesh=make_mesh(tp=4), in_specs=(P(), P(None, "tp")), out_specs=P())
    np.testing.assert_allclose(jax.jit(mapped)(x, head), x @ head[:, :V], atol=1e-5)


def test_shapes_that_do_not_agree():
    x, head, targets, weights = _inputs(1)
    with pytest.raises(ValueError, match="must agree"):
        _parallel_nll(1)(x, head, targets[:, :-1], weights)


def test_outside_of_a_manual_region():
    x, head, targets, weights = _inputs(1)
    with pytest.raises(ValueError, match="cross_entropy: axis 'tp' is not a manual mesh axis"):
        vocab_parallel.cross_entropy(x, head, targets, weights, "tp", vocab_size=V)
    with pytest.raises(ValueError, match="embed: axis 'tp' is not a manual mesh axis"):
        vocab_parallel.embed(head.T, targets, "tp")


def test_logits_exist_a_chunk_at_a_time():
    """Values, ties and memory of `vocab_parallel.logprobs` on two ranks, for a vocabulary that is padded."""
    mesh, length, vocab, random = make_mesh(tp=2), 300, 500, np.random.default_rng(3)
    x = random.standard_normal((length, 8)).astype(np.float32)
    head = random.standard_normal((8, 512)).astype(np.float32)
    head[:, 3] *= 4
    head[:, 400] = head[:, 3]  # a tie between ranks, another in one
    head[:, 5] = head[:, 4]
    targets = random.integers(0, vocab, length).astype(np.int32)

    def jitted(softcap):
        run = functools.partial(vocab_parallel.logprobs, axis="tp", vocab_size=vocab, top=7, chunk=64, softcap=softcap)
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P(None, "tp"), P()), out_specs=P()))

    program = jitted(None)
    chosen, best, ids = map(np.asarray, program(x, head, targets))
    logits = (x.astype(np.float64) @ head)[:, :vocab]
    want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(chosen, want[np.arange(length), targets], atol=1e-4)
    order = np.argsort(-want.astype(np.float32), axis=1, kind="stable")[:, :7]
    np.testing.assert_allclose(best, np.take_along_axis(want, order, 1), atol=1e-4)
    assert (ids == order).all()
    ties = (ids[:, :-1] == 3) & (ids[:, 1:] == 400)
    assert ties.any()
    exact = program(x, head, ids[:, 2])[0]
    assert (np.asarray(exact) == best[:, 2]).all()
    assert np.isnan(program(x, head, jnp.full(length, vocab))[0]).all()
    text = program.lower(x, head, targets).compile().as_text()
    assert "f32[60,256]" in text and not any(f"f32[{rows},256]" in text for rows in (300, 320, 64))
    assert "f32[5,60,256]" not in text and "f32[300,512]" not in text
    capped = 3 * np.tanh(logits / 3)
    want = capped - np.log(np.exp(capped).sum(1, keepdims=True))
    chosen, best, _ = jitted(3.0)(x, head, targets)
    np.testing.assert_allclose(chosen, want[np.arange(length), targets], atol=1e-4)
    np.testing.assert_allclose(best, -np.sort(-want, axis=1)[:, :7], atol=1e-4)
