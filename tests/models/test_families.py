"""Scaled rotary positions, sliding windows and Gemma's parts: transformers' own models are the reference."""

import json

import numpy as np
import pytest
from families import FAMILIES, LENGTH, reference
from model_helpers import Run

from taco_jax.models import huggingface, rope
from taco_jax.models.config import ModelConfig
from taco_jax.models.huggingface_features import feature_keys

pytest.importorskip("torch", reason="the models of reference: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="the models of reference: pip install 'taco-jax[test]'")
SLOW = pytest.mark.slow
# tp 4 replicates the two kv heads.
EVERY_DAY = {"yarn": 1, "qwen2": 4, "gemma2": 2, "gemma3": 1}


@pytest.mark.parametrize(
    "name, tp",
    [pytest.param(name, tp, marks=() if EVERY_DAY.get(name) == tp else SLOW) for name in FAMILIES for tp in (1, 2, 4)],
)
def test_logits_equal_transformers(name, tp):
    hf, state, tokens, want = reference(name)
    config = huggingface.config_from_hf(hf)
    got = Run(config, tp=tp, length=LENGTH).logits(huggingface.params_from_hf(state, config, tp), tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=min(1e-4, 1e-5 * np.abs(want).max()))


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn_mscale", "yarn_factor"])
def test_frequencies_equal_transformers(name):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = reference(name)[0]
    config, theirs = huggingface.config_from_hf(hf), transformers.AutoConfig.for_model(**hf)
    want, factor = ROPE_INIT_FUNCTIONS[config.rope_type](theirs)
    np.testing.assert_allclose(rope.rope_angles(config, np.arange(3))[2], 2 * want.numpy(), rtol=1e-6)
    assert rope.attention_factor(config) == pytest.approx(factor)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_feature_that_is_left_out_shows(name):
    """The models are small, but not so small that their features do nothing."""
    config = huggingface.config_from_hf(reference(name)[0])
    plain = {"rope_type", "sliding_window", "norm_plus_one", "attention_softcap", "rope_local_theta"}
    if name != "mistral_wide":
        assert any(getattr(config, field) != getattr(ModelConfig(), field) for field in plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_feature_keys_give_the_config_back(name):
    hf = json.loads(json.dumps(reference(name)[0]))
    config = huggingface.config_from_hf(hf)
    keys = feature_keys(config)
    features = {"rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window",
                "max_window_layers", "rope_local_base_freq", "query_pre_attn_scalar", "final_logit_softcapping",
                "attn_logit_softcapping", "sliding_window_pattern", "_sliding_window_pattern"}  # fmt: skip
    sizes = {key: value for key, value in hf.items() if key not in features}
    # Without a window a Mistral is a Llama.
    assert keys["model_type"] == ("llama" if name == "mistral_wide" else hf["model_type"])
    assert huggingface.config_from_hf(sizes | keys) == config
    # transformers reads them as the same model.
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(sizes | keys)))
    assert huggingface.config_from_hf(theirs.to_dict()) == config


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3"])
def test_weights_go_back(name):
    hf, state, _, _ = reference(name)
    config = huggingface.config_from_hf(hf)
    back = huggingface.params_to_hf(huggingface.params_from_hf(state, config, tp=2), config)
    state = {key: value for key, value in state.items() if key != "lm_head.weight" or not config.tied_head}
    assert back.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(back[key], value)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"positions": "learned", "sliding_window": 4}, "sliding_window=4: .*; gpt2 is the nearest"),
        ({"sliding_window": 4, "attention_pattern": "sf"}, "attention_pattern='sf': .*; mistral is the nearest"),
        ({"sliding_window": 4, "mlp_bias": True}, "sliding_window=4: .*; mistral is the nearest"),
        ({"norm_plus_one": True}, "scale_embedding=False: .*; gemma is the nearest"),
        ({"logit_softcap": 3.0, "qk_norm": True}, "logit_softcap=3.0: .*; qwen3 is the nearest"),
        ({"attention_scale": 0.5}, "attention_scale=0.5: .*; llama is the nearest"),
    ],
)
def test_mixtures_that_no_family_has(changes, said):
    with pytest.raises(ValueError, match=said):
        feature_keys(ModelConfig(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_type": "yarn", "rope_factor": 2.0}, "rope_original_length=None: must be the longest sequence before"),
        ({"rope_factor": 2.0}, "rope_factor=2.0: is of rope_type=linear, llama3 or yarn, not of 'default'"),
        ({"rope_type": "linear", "positions": "learned"}, "rope_type='linear': needs positions='rope'"),
        ({"rope_local_theta": 1e4}, "rope_local_theta=10000.0: is of layers with a sliding_window"),
        ({"sliding_window": True}, "sliding_window=True: must be an integer of at least 1, or None"),
        ({"attention_pattern": "sf"}, "attention_pattern='sf': is of a model with a sliding_window"),
        ({"attention_pattern": "fff", "sliding_window": 4}, "attention_pattern='fff': leaves no layer a window"),
        ({"attention_pattern": "", "sliding_window": 4}, "attention_pattern='': must be letters s"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0: must be above 0 and finite, such as 50.0"),
        ({"post_norms": True, "norm": "layernorm"}, "post_norms=True: needs norm='rmsnorm', not 'layernorm'"),
    ],
)
def test_rules_of_the_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_equal_patterns_are_equal_configs():
    of = lambda pattern: ModelConfig(n_layers=4, sliding_window=4, attention_pattern=pattern)
    assert of("sf") == of("sfsf") == of("sfsfs") and of("sf").windows == (True, False, True, False)
    assert of("ssss") == of("s") and of("s").windows is True and hash(of("ffs")) == hash(of("ffsf"))
    assert ModelConfig().windows is False
