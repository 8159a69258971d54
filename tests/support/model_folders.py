"""Folders of a tiny Llama, written by hand without torch: its config, its tensors, and how they are read back."""

import json

import jax.numpy as jnp
import numpy as np
from helpers import make_mesh

from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.inference.tensors import INDEX, SINGLE

CONFIG = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
    "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
EMBED, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed).standard_normal
    shapes = {f"self_attn.{x}_proj": (8, 8) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)}
    shapes |= {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    named = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {EMBED: (24, 8), "model.norm.weight": (8,)}
    return {name: draw(shape).astype(np.float32) for name, shape in named.items()}


def write(folder, config=CONFIG, files=None, index=None):
    """A folder of safetensors files, {SINGLE: arrays()} by default; index: {tensor: file}."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file, tensors in ({SINGLE: arrays()} if files is None else files).items():
        save_file(tensors, folder / file)
    if index is not None:
        (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def load(folder):
    return load_params(open_checkpoint(folder), make_mesh(), jnp.float32)


def up(params):
    return np.asarray(params["layers"]["mlp"]["up"]["kernel"])[0].T
