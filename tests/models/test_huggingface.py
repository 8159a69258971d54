"""Logits of Hugging Face's own models with small random weights, on the CPU in float32, are the reference."""

import dataclasses

import numpy as np
import pytest
from model_helpers import Run

from taco_jax.models import huggingface

SIZES = {"vocab_size": 300, "attn_implementation": "eager"}
LLAMA_SIZES = SIZES | {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
# Name -> (class prefix in transformers, config arguments, further fields of our config).
MODELS = {
    "gpt2": ("GPT2", SIZES | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}, {"tied_head": True}),
    "llama": ("Llama", LLAMA_SIZES | {"rope_theta": 5e5}, {"tied_head": False, "rope_theta": 5e5}),
    "llama_biases": ("Llama", LLAMA_SIZES | {"attention_bias": True, "mlp_bias": True}, {"out_bias": True}),
    "qwen2": ("Qwen2", LLAMA_SIZES | {"rope_theta": 1e6}, {"qkv_bias": True, "out_bias": False, "rope_theta": 1e6}),
    "qwen2_tied": ("Qwen2", LLAMA_SIZES | {"tie_word_embeddings": True}, {"tied_head": True}),
    "qwen3": ("Qwen3", LLAMA_SIZES | {"head_dim": 16}, {"qk_norm": True, "head_dim": 16}),
}


@pytest.fixture(scope="module")
def reference():
    """name -> (their config dict, their state dict as numpy, tokens, their logits)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    known = {}

    def build(name: str):
        if name not in known:
            prefix, arguments, _ = MODELS[name]
            torch.manual_seed(0)
            config = getattr(transformers, f"{prefix}Config")(**arguments)
            head = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
            model = getattr(transformers, prefix + head)(config).eval().float()
            with torch.no_grad():
                for weight in model.parameters():  # biases and norms start at 0 and 1, where a mix-up would not show
                    weight.add_(0.05 * torch.randn_like(weight))
                tokens = np.random.default_rng(0).integers(0, 300, (2, 24))
                logits = model(torch.as_tensor(tokens)).logits.numpy()
            state = {key: value.numpy() for key, value in model.state_dict().items()}
            known[name] = config.to_dict(), state, tokens.astype(np.int32), logits
        return known[name]

    return build


def _run(config, tp: int) -> Run:
    return Run(config, tp=tp, length=24)


@pytest.mark.parametrize("name", MODELS)
def test_config(reference, name):
    hf_config, _, _, _ = reference(name)
    config = huggingface.config_from_hf(hf_config)
    assert config.vocab_size == 300 and config.n_layers == 3 and config.d_model == 32
    for field, value in MODELS[name][2].items():
        assert getattr(config, field) == value, field


@pytest.mark.parametrize("name, tp", [(name, 1) for name in MODELS] + [("gpt2", 4), ("qwen2", 4), ("qwen3", 2)])
def test_logits_equal_transformers(reference, name, tp):
    hf_config, state, tokens, want = reference(name)
    config = huggingface.config_from_hf(hf_config)
    params = huggingface.params_from_hf(state, config, tp)
    got = _run(config, tp).logits(params, tokens)
    assert got.shape == want.shape
    # float32 rounding: some ten ulps of the largest logit, after three layers.
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max() + 1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(reference, name):
    hf_config, state, _, _ = reference(name)
    config = huggingface.config_from_hf(hf_config)
    back = huggingface.params_to_hf(huggingface.params_from_hf(state, config, tp=2), config)
    if config.tied_head:
        state = {key: value for key, value in state.items() if key != "lm_head.weight"}
    assert back.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(back[key], value)


def test_names_without_prefix(reference):
    hf_config, state, _, _ = reference("llama")
    config = huggingface.config_from_hf(hf_config)
    bare = {key.removeprefix("model."): value for key, value in state.items()}
    want, got = huggingface.params_from_hf(state, config), huggingface.params_from_hf(bare, config)
    np.testing.assert_array_equal(got["layers"]["mlp"]["up"]["kernel"], want["layers"]["mlp"]["up"]["kernel"])


def test_state_dict_that_does_not_fit(reference):
    hf_config, state, _, _ = reference("qwen2")
    config = huggingface.config_from_hf(hf_config)
    without = {key: value for key, value in state.items() if key != "model.norm.weight"}
    with pytest.raises(ValueError, match="missing norm.weight; left over none"):
        huggingface.params_from_hf(without, config)
    with pytest.raises(ValueError, match="missing none; left over stray.weight"):
        huggingface.params_from_hf(state | {"stray.weight": np.zeros(3)}, config)
    with pytest.raises(ValueError, match=r"mlp/gate/kernel: the state dict has shape \(3, 32, 48\).*\(3, 32, 96\)"):
        huggingface.params_from_hf(state, dataclasses.replace(config, d_mlp=96))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mixtral"}, "model_type='mixtral': must be one of gpt2, llama, mistral, qwen2, qwen3, gemma"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor: is missing, and this rope_type needs it"),
        ({"rope_scaling": {"type": ["yarn"]}}, r"rope_scaling.type=\['yarn'\]: this decoder has default,"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type='dynamic': this decoder has default,",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fsat": 8}},
            "rope_parameters.beta_fsat=8: rope_type='yarn' takes factor, .*; did you mean 'beta_fast'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8}},
            "rope_scaling.beta_fast=8: type='linear' takes factor beside rope_theta; is of yarn",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor='2': must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_factor=0.5: must be at least 1 and finite"),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear"}},
            "rope_scaling.type='yarn': is another name",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "rope_low_frequency=4.0: must be below rope_high_frequency=4.0",
        ),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "sliding_window=0: must be an int"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types\[0\]='sliding_attention': needs use_sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types: names 1 layers, must be num_hidden_layers=2"),
        ({"layer_types": ["chunked_attention"] * 2}, r"layer_types\[0\]='chunked_attention': this decoder has only"),
        ({"hidden_act": "mish"}, "activation 'mish': must be one of"),
    ],
)
def test_unknown_configs(change, message):
    hf = {
        "model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
        "hidden_act": "silu",
    }  # fmt: skip
    assert huggingface.config_from_hf(hf).qkv_bias
    with pytest.raises(ValueError, match=message):
        huggingface.config_from_hf(hf | change)


def test_other_names_of_gpt2_s_sizes():
    transformers = pytest.importorskip("transformers")
    hf = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64).to_dict()
    want = huggingface.config_from_hf(hf)
    both = hf | {other: hf[key] for other, key in huggingface.GPT2_NAMES.items()}
    others = {key: value for key, value in both.items() if key not in huggingface.GPT2_NAMES.values()}
    assert huggingface.config_from_hf(both) == huggingface.config_from_hf(others) == want
    assert transformers.GPT2Config(**others).to_dict() == hf
    assert transformers.GPT2Config(**hf | {"num_attention_heads": 2}).n_head == 2  # so of two values one is wrong
    with pytest.raises(ValueError, match="num_attention_heads=2: is another name of n_head=4; keep the right one"):
        huggingface.config_from_hf(hf | {"num_attention_heads": 2})
