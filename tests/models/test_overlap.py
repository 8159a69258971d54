"""Chains: parts of the batch, side by side in every layer, compute and send what the whole batch does."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from helpers import make_mesh
from model_helpers import CONFIGS, GPT2, QWEN2, Run, assert_gradients_close

from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, TrainConfig
from taco_jax.models.overlap import chain_count
from taco_jax.train.site_stats import summarise_stats
from taco_jax.train.step import build

BATCH = 8
# Two ranks exchange: every value is quantised in one block, whichever message it travels in. Blocks of 128 do not
# cross the 512 values of a sequence.
EXCHANGE = Run(QWEN2, tp=2, codec="taco")
SLOW = pytest.mark.slow


@functools.cache
def _reference(name):
    return Run(CONFIGS[name]).gradients()


@pytest.mark.parametrize(
    "name, tp, dp, sequence_parallel, remat, n",
    [
        pytest.param("qwen2", 1, 1, False, "none", 2, marks=SLOW),
        pytest.param("qwen2", 2, 1, True, "full", 2, marks=SLOW),
        ("qwen2", 2, 1, False, "full", 4),
        pytest.param("qwen2", 4, 1, False, "dots", 4, marks=SLOW),
        pytest.param("qwen3", 2, 2, False, "full", 2, marks=SLOW),
        pytest.param("qwen3", 4, 1, True, "none", 2, marks=SLOW),
        pytest.param("gpt2", 2, 2, True, "dots", 4, marks=SLOW),
        pytest.param("gpt2", 4, 1, False, "full", 8, marks=SLOW),
        pytest.param("llama", 2, 1, False, "none", 3, marks=SLOW),
    ],
)
def test_gradients_equal_those_of_one_device(name, tp, dp, sequence_parallel, remat, n):
    run = Run(
        CONFIGS[name], tp=tp, dp=dp, sequence_parallel=sequence_parallel, remat=remat, chains=n
    )  # fmt: skip
    loss, gradients, _ = run.gradients()
    want_loss, want, _ = _reference(name)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients_close(gradients, want, exact=True)


@pytest.mark.parametrize(
    "codec, remat, n",
    [
        pytest.param("taco", "full", 2, marks=SLOW),
        pytest.param("taco", "full", 4, marks=SLOW),
        pytest.param("int8h", "dots", 4, marks=SLOW),
        pytest.param("e4m3", "none", 4, marks=SLOW),
    ],
)
def test_compressed_gradients_and_largest_scales_are_those_of_one_chain(codec, remat, n):
    run = dataclasses.replace(EXCHANGE, codec=codec, remat=remat)
    loss, gradients, amax = dataclasses.replace(run, chains=n).gradients()
    want_loss, want, want_amax = run.gradients()
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    # Another order of a sum may put a value on the other side of a rounding threshold.
    whole = np.sqrt(sum(np.linalg.norm(leaf) ** 2 for leaf in want.values()))
    for path, leaf in want.items():
        assert np.linalg.norm(gradients[path] - leaf) <= 1e-3 * whole, path
    for site, slot in want_amax.items():
        # The largest, not the sum: that would be up to n times as large.
        np.testing.assert_allclose(amax[site], slot, rtol=1e-3, err_msg=site)


def test_a_sum_that_is_handed_on_takes_the_bias_of_its_own_layer():
    loss, gradients, _ = Run(GPT2, tp=2, remat="full", chains=2).gradients()
    want_loss, want, _ = _reference("gpt2")
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients_close(gradients, want, exact=True)


def test_the_largest_scale_counts_where_the_last_chain_has_it():
    run = dataclasses.replace(EXCHANGE, remat="full", chains=2)
    params, *batch, exponents = run.arguments()
    in_reverse = [values[::-1] for values in batch]
    one, other = (run.compiled()[0](params, *values, exponents)[2] for values in (batch, in_reverse))
    for site, slot in one.items():
        np.testing.assert_allclose(other[site], slot, rtol=1e-3, err_msg=site)


@SLOW
@pytest.mark.parametrize("tp, sequence_parallel", [(4, False), (2, True)])
def test_compressed_gradients_in_two_hops(tp, sequence_parallel):
    run = Run(GPT2, tp=tp, codec="taco", sequence_parallel=sequence_parallel, remat="full", chains=2)
    assert_gradients_close(run.gradients()[1], _reference("gpt2")[1], exact=False)


@SLOW
def test_statistics_are_those_of_one_chain():
    def measure(n):
        config = TrainConfig(
            model=QWEN2, mesh=MeshConfig(tp=2), compression=CompressionConfig("taco", "int8h", min_bytes=0),
            data=DataConfig(sequence_length=16), global_batch=BATCH, accumulation=2, compute_dtype="float32", chains=n,
        )  # fmt: skip
        p = build(config, make_mesh(tp=2))
        tokens = np.random.default_rng(0).integers(0, 256, (BATCH, 17), np.int32)
        stats = p.step_with_stats(p.init(jax.random.key(0)), {"tokens": jax.device_put(tokens, p.batch_sharding)})[1]
        return p, jax.tree.map(np.asarray, stats["stats"])

    (one, want), (two, got) = measure(1), measure(2)
    for site, values in want.items():
        np.testing.assert_allclose(got[site], values, rtol=2e-3, err_msg=site)
    assert summarise_stats(got).keys() == summarise_stats(want).keys()
    # The same bytes in more messages.
    calls = lambda p: {(r.site, r.direction): r.calls for r in p.table.rows() if r.site.startswith("layers/")}
    assert calls(two) == {key: 2 * n for key, n in calls(one).items()} and set(calls(one).values()) == {2 * 2}
    np.testing.assert_allclose(two.table.total(), one.table.total(), rtol=0.3)  # tiles of 1,024 bytes are padded
    assert two.table.total()[1] == one.table.total()[1]


def test_a_batch_makes_the_most_chains_that_divide_it():
    assert [chain_count(batch, 4) for batch in range(1, 9)] == [1, 2, 3, 4, 1, 3, 1, 4]
    run = Run(QWEN2, tp=2)
    tokens = run.batch_arrays()[0][:1]
    many = dataclasses.replace(run, chains=4)
    np.testing.assert_array_equal(many.logits(tokens=tokens), run.logits(tokens=tokens))
    np.testing.assert_allclose(many.logits(), run.logits(), rtol=1e-5, atol=1e-6)


def test_one_chain_leaves_the_program_as_it_is():
    def text(n):
        run = Run(QWEN2, tp=2, codec="taco", remat="dots", chains=n, batch=1)
        return run.value_and_grad().lower(*run.arguments()).as_text()

    assert text(1) == text(4)
    # Joined kernels and cotangents have barriers of their own; those of chains hold several arrays.
    assert "optimization_barrier" in text(1) and not re.search(r"optimization_barrier %[\w#]+,", text(1))


def test_recomputation_neither_sends_nor_multiplies_more():
    def products(run):
        compiled, _ = run.compiled()
        text = compiled.as_text()
        sums = [line for line in text.splitlines() if " all-reduce(" in line and "while/body" in line]
        return text.count(" dot(") + text.count("__onednn$matmul"), len(sums)

    run = Run(QWEN2, tp=2, remat="full")
    one, two, four = (products(dataclasses.replace(run, chains=n)) for n in (1, 2, 4))
    # What is in a layer is there once for each chain.
    assert four[0] - two[0] == 2 * (two[0] - one[0]) > 0
    assert four[1] - two[1] == 2 * (two[1] - one[1]) > 0
