"""Sliding windows and documents: gradients on every mesh are those of one device; a document is as it is alone.

That a window is where transformers has it is tested in `test_families.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import GEMMA, GPT2, QWEN2, WINDOWS, Run, assert_gradients_close, check_decoder, reference_gradients
from pipeline_programs import EXACT, batch, gradients, on, program, state

from taco_jax.config import ConfigError, DataConfig
from taco_jax.models import attention
from taco_jax.models.documents import documents, positions_in_documents
from taco_jax.models.run_config import Parallel
from taco_jax.train import step

SLOW = pytest.mark.slow
END = 7


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(GEMMA, tp=2, chains=2, end_token=END), id="gemma-chains"),
        pytest.param(Run(WINDOWS, tp=4, dp=2, sequence_parallel=True, remat="dots"), marks=SLOW, id="windows"),
        pytest.param(Run(GPT2, tp=2, sequence_parallel=True, end_token=END), marks=SLOW, id="gpt2-documents"),
        pytest.param(Run(GEMMA, tp=4, dp=2, sequence_parallel=True, remat="full"), marks=SLOW, id="gemma-sequence"),
        pytest.param(Run(GEMMA, tp=2, chains=4, remat="dots"), marks=SLOW, id="gemma-dots"),
        pytest.param(Run(GEMMA, tp=8, chains=2, remat="full", end_token=END), marks=SLOW, id="gemma-full"),
        pytest.param(Run(GEMMA, tp=2, chains=2, sequence_parallel=True), marks=SLOW, id="gemma-both"),
        pytest.param(Run(WINDOWS, tp=2, chains=4, remat="full", end_token=END), marks=SLOW, id="windows-chains"),
        pytest.param(Run(QWEN2, tp=2, dp=4, chains=2, end_token=END), marks=SLOW, id="documents-chains"),
        pytest.param(Run(GPT2, tp=4, dp=2, remat="dots", end_token=END), marks=SLOW, id="gpt2-dots"),
    ],
)
def test_gradients_equal_those_of_one_device(run):
    check_decoder(run)


def test_every_leaf_of_gemma_has_a_gradient():
    for path, leaf in reference_gradients(GEMMA, END)[1].items():
        assert np.abs(leaf).max() > 1e-7, path


@SLOW
def test_compressed_chains_of_post_norms_are_one_chain():
    """Two ranks exchange in blocks that do not cross sequences: each value is quantised alike in any chain.

    Another order of a sum may put a value on the other side of a rounding threshold."""
    loss, got, amax = Run(GEMMA, tp=2, codec="taco", chains=2).gradients()
    want_loss, want, want_amax = Run(GEMMA, tp=2, codec="taco").gradients()
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    whole = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in want.values()))
    for path, leaf in want.items():
        assert np.linalg.norm(got[path] - leaf) <= 5e-3 * whole, path
    for site, slot in want_amax.items():
        np.testing.assert_allclose(amax[site], slot, rtol=2e-2, err_msg=site)


STAGES = dataclasses.replace(
    EXACT,
    model=dataclasses.replace(GPT2, n_layers=4, sliding_window=5, attention_pattern="sff"),
    data=DataConfig(sequence_length=16, document_mask=True, end_token_id=END),
)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(dict(pp=2, tp=2, schedule="circular", sequence_parallel=True), id="circular"),
        pytest.param(dict(pp=4, schedule="1f1b"), marks=SLOW, id="1f1b"),
        pytest.param(dict(dp=2, pp=4, schedule="gpipe", remat="full"), marks=SLOW, id="gpipe"),
        pytest.param(dict(pp=2, tp=4, schedule="1f1b", chains=2, accumulation=2), marks=SLOW, id="chains"),
    ],
)
def test_stages_have_the_windows_and_documents_of_one_device(mesh):
    got, want = gradients(on(STAGES, **mesh)), gradients(on(STAGES))
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert_gradients_close(got.grads, want.grads, exact=True)


@SLOW
@pytest.mark.parametrize("mesh", [dict(pp=2, schedule="circular"), dict(tp=2)])
def test_validation_has_the_mask_too(mesh):
    p = program(on(STAGES, **mesh))
    nll, count = p.eval_step(state(p), batch(p))
    assert float(nll / count) == pytest.approx(gradients(on(STAGES)).loss, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT2, id="learned"),
        pytest.param(QWEN2, marks=SLOW, id="rope"),
        pytest.param(WINDOWS, marks=SLOW, id="windows"),
    ],
)
def test_a_document_computes_what_it_does_alone(config):
    run = Run(config, tp=2, batch=2, end_token=END)
    tokens = run.batch_arrays()[0]
    tokens[tokens == END] = 0
    tokens[0, [5, 11]] = tokens[1, [0, 14]] = END
    params = run.params()
    packed = run.logits(params, tokens)
    for row, begin, end in [(0, 0, 6), (0, 6, 12), (0, 12, 16), (1, 0, 1), (1, 1, 15), (1, 15, 16)]:
        alone = np.zeros_like(tokens)
        alone[:, : end - begin] = tokens[row, begin:end]
        alone[:, end - begin :] = 1  # behind it, where nothing looks from
        want = run.logits(params, alone)[0, : end - begin]
        np.testing.assert_allclose(packed[row, begin:end], want, atol=2e-6, err_msg=f"{row}, {begin} to {end}")
    assert np.abs(packed - dataclasses.replace(run, end_token=None).logits(params, tokens)).max() > 1e-3


def test_documents_by_hand():
    tokens = jnp.array([[3, END, 4, 5, END, END, 6], [END, 1, 1, 1, 1, 1, 1]])
    numbers = documents(tokens, END)
    assert numbers.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert positions_in_documents(numbers).tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert documents(tokens, None) is None


@pytest.mark.parametrize("sliding", [True, pytest.param(False, marks=SLOW)])
def test_cudnn_is_given_the_window_of_the_layer(monkeypatch, sliding):
    """Its part is taken by XLA's, so that values and gradients show which window a layer got."""
    asked, attend = [], jax.nn.dot_product_attention

    def record(*args, implementation=None, **options):
        asked.append((implementation, options.get("local_window_size")))
        return attend(*args, **options)

    q, k, v = (jax.random.normal(jax.random.key(i), (2, 16, n, 8)) for i, n in enumerate((4, 2, 2)))
    context = attention.Context(sliding=jnp.array(sliding))
    square = lambda implementation, config, context: (
        lambda q: jnp.sum(
            attention.causal(config, Parallel(attention_implementation=implementation))(q, k, v, context) ** 2
        )
    )
    uniform = dataclasses.replace(WINDOWS, attention_pattern="s", sliding_window=5 if sliding else None)
    want = jax.jit(jax.grad(square("xla", uniform, attention.Context())))(q)
    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    for implementation in ("cudnn", "xla"):
        got = jax.jit(jax.grad(square(implementation, WINDOWS, context)))(q)
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert set(asked) == {("cudnn", (4, 0)), ("cudnn", None), ("xla", None)}


@SLOW
def test_stages_with_cudnn_s_two_kinds_of_layers(monkeypatch):
    attend = jax.nn.dot_product_attention
    ignore = lambda *args, implementation=None, **options: attend(*args, **options)
    config = dataclasses.replace(STAGES, data=DataConfig(sequence_length=16))
    want = gradients(on(config))
    monkeypatch.setattr(jax.nn, "dot_product_attention", ignore)
    monkeypatch.setattr(step, "_attention", lambda *_: "cudnn")
    got = gradients(on(config, dp=2, pp=2, tp=2, schedule="circular"))
    assert_gradients_close(got.grads, want.grads, exact=True)


def test_cudnn_is_refused_where_it_cannot():
    with pytest.raises(ConfigError, match="'cudnn': cannot have data.document_mask=True; use 'xla' or leave it out"):
        program(on(STAGES, attention_implementation="cudnn"))
