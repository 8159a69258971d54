"""`Generator.of`: parameters that are in memory, wherever and however padded, and random ones; and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import make_mesh
from model_helpers import CONFIGS, QWEN2, Run

import taco_jax
from taco_jax.config import ConfigError
from taco_jax.inference.loading import in_memory, load_params

PROMPT, NEW = [5, 17, 200, 33, 9], 4


def ids(generator, prompt=PROMPT):
    return [token.id for token in generator.generate(prompt, max_tokens=NEW)]


@pytest.mark.parametrize("name, trained_tp, tp", [("qwen2", 4, 1), pytest.param("gpt2", 1, 2, marks=pytest.mark.slow)])
def test_trained_parameters_go_on_with_prompts(name, trained_tp, tp):
    """Tables padded for other ranks, on the devices of another mesh: the tokens of full recomputation."""
    run = Run(CONFIGS[name], tp=trained_tp, batch=1, length=len(PROMPT) + NEW)
    params = run.params()
    tokens = np.zeros((1, len(PROMPT) + NEW), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    for at in range(len(PROMPT), tokens.shape[1]):
        tokens[0, at] = np.asarray(run.logits(params, tokens))[0, at - 1].argmax()
    expected = tokens[0, len(PROMPT) :].tolist()
    make_mesh(tp=tp)  # skips where there are too few devices
    generator = taco_jax.Generator.of(run.config, params, tp=tp, dtype="float32")
    assert ids(generator) == expected
    real = jax.tree.map(np.asarray, params)
    real["embed"]["table"] = real["embed"]["table"][: run.config.vocab_size]
    assert ids(taco_jax.Generator.of(run.config, real, tp=tp, dtype="float32", eos=expected[:1])) == expected[:1]
    with pytest.raises(ConfigError, match="prompt: the model came without a tokenizer, so it must be token ids"):
        generator.generate("text")


def test_types_on_the_mesh():
    mesh = make_mesh(tp=2)
    given = jax.tree.map(lambda x: np.asarray(x, ml_dtypes.bfloat16), Run(QWEN2).params())
    params = load_params(in_memory(QWEN2, given), mesh, jnp.float16)
    up, norm = params["layers"]["mlp"]["up"]["kernel"], params["layers"]["attn_norm"]["scale"]
    assert up.dtype == jnp.float16 and norm.dtype == params["final_norm"]["scale"].dtype == jnp.float32
    assert up.addressable_shards[0].data.shape == (2, 32, 32)
    np.testing.assert_array_equal(up, given["layers"]["mlp"]["up"]["kernel"].astype(np.float16))


@pytest.mark.slow
def test_random_parameters_depend_on_the_seed_alone():
    of = lambda tp, seed: ids(taco_jax.Generator.of(QWEN2, tp=tp, seed=seed, dtype="float32"))
    make_mesh(tp=2)
    assert of(1, 0) == of(2, 0) != of(1, 1)


def without(tree, *path):
    head, *rest = path
    return {k: (without(v, *rest) if rest else None) if k == head else v for k, v in tree.items() if rest or k != head}


def changed(tree, value, *path):
    head, *rest = path
    return tree | {head: changed(tree[head], value, *rest) if rest else value}


@pytest.mark.parametrize(
    "change,message",
    [
        (
            lambda p: without(p, "layers", "attn", "q", "bias"),
            "the tensor 'layers/attn/q/bias' is missing; the config needs 15 tensors",
        ),
        (lambda p: changed(p, np.zeros(3, np.float32), "final_norm", "bias"), "'final_norm/bias' is left over: a"),
        (
            lambda p: changed(p, np.zeros((2, 32), np.float32), "layers", "mlp", "up", "kernel"),
            "'layers/mlp/up/kernel' has shape [2, 32], the config needs [2, 32, 64]",
        ),
        (
            lambda p: changed(p, np.zeros((301, 32), np.float32), "embed", "table"),
            "'embed/table' has shape [301, 32], the config needs [300, 32] (dim 0 may be padded for a number of ranks",
        ),
        (
            lambda p: changed(p, np.zeros((2, 32), np.int32), "layers", "attn_norm", "scale"),
            "'layers/attn_norm/scale' is int32[2, 32]: must be an array of floats",
        ),
        (lambda p: changed(p, 1.0, "final_norm", "scale"), "'final_norm/scale' is float: must be an array of floats"),
    ],
)
def test_what_does_not_fit_is_one_line(change, message):
    params = jax.tree.map(np.asarray, Run(QWEN2).params())
    with pytest.raises(ConfigError) as error:
        taco_jax.Generator.of(QWEN2, change(params))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_arguments_are_those_of_the_generator(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer='.*/none.json': no such file; name a tokenizer.json"):
        taco_jax.Generator.of(QWEN2, tokenizer=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="tp 3 does not divide 8"):
        taco_jax.Generator.of(QWEN2, tp=3)
    with pytest.raises(ConfigError, match="dtype='int8': must be one of"):
        taco_jax.Generator.of(dataclasses.replace(QWEN2, n_layers=1), dtype="int8")
