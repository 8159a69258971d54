"""Tiny random models of transformers with scaled rotary positions, sliding windows and Gemma's parts."""

import functools

import numpy as np

LENGTH = 24
SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "attn_implementation": "eager",
}  # fmt: skip
ROPE = {"llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
        "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}}  # fmt: skip
MSCALE = {"rope_theta": 50.0, "mscale": 1.0, "mscale_all_dim": 0.4, "truncate": False}
MISTRAL = SIZES | {"sliding_window": 7}
QWEN = SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "rope_theta": 1e4}
GEMMA = SIZES | {"head_dim": 16, "pad_token_id": None}
# Name -> (class prefix in transformers, config arguments).
FAMILIES = {
    "linear": ("Llama", SIZES | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e3}),
    "llama3": ("Llama", SIZES | {"rope_scaling": ROPE["llama3"], "rope_theta": 5e2, "head_dim": 16}),
    "yarn": ("Qwen2", SIZES | {"rope_scaling": ROPE["yarn"], "head_dim": 16, "rope_theta": 1e2}),
    "yarn_mscale": ("Llama", SIZES | {"rope_parameters": ROPE["yarn"] | MSCALE, "head_dim": 16}),
    "yarn_factor": ("Llama", SIZES | {"rope_scaling": ROPE["yarn"] | {"attention_factor": 1.3}, "head_dim": 16}),
    "mistral": ("Mistral", MISTRAL),
    "mistral_wide": ("Mistral", SIZES | {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", QWEN),
    "qwen3": ("Qwen3", QWEN | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma": ("Gemma", GEMMA | {"hidden_act": "gelu"}),
    "gemma2": ("Gemma2", GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5,
                                  "final_logit_softcapping": 0.3}),
    "gemma3": ("Gemma3", GEMMA | {"sliding_window": 6, "query_pre_attn_scalar": 24, "sliding_window_pattern": 2,
                                  "rope_theta": 1e3, "rope_local_base_freq": 1e1,
                                  "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
}  # fmt: skip


def make(prefix: str, arguments: dict):
    """A model of theirs in which every weight matters: biases and norms are random too."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")(**arguments)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


@functools.cache
def reference(name: str):
    """(their config as a dict, their state dict as numpy, tokens [2, LENGTH], their logits)."""
    import torch

    prefix, arguments = FAMILIES[name]
    # "gelu" of Gemma's first files means the tanh form; not every release of transformers takes it so.
    legacy = {"hidden_act": "gelu"} if arguments.get("hidden_act") == "gelu" else {}
    model = make(prefix, arguments | dict.fromkeys(legacy, "gelu_pytorch_tanh"))
    tokens = np.random.default_rng(0).integers(0, 300, (2, LENGTH))
    with torch.no_grad():
        logits = model(torch.as_tensor(tokens)).logits.numpy()
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    return model.config.to_dict() | legacy, state, tokens.astype(np.int32), logits
