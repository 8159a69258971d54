"""Tiny random models that `transformers` writes into a folder: `save(name, folder)`; what it makes of them is the
reference. Needs torch and transformers, which come with the extra `test`."""

import json
from pathlib import Path

import numpy as np

VOCAB = 300
SIZES = {"vocab_size": VOCAB, "attn_implementation": "eager", "eos_token_id": None, "bos_token_id": None}
LLAMA = SIZES | {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "head_dim": 12,
}  # fmt: skip
# Name -> (class prefix in transformers, config arguments).
MODELS = {
    "gpt2": ("GPT2", SIZES | {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", LLAMA | {"rope_theta": 5e5}),
    "smollm": (
        "Llama",
        LLAMA
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}
        | {"tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2", LLAMA | {"rope_theta": 1e6}),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
}


def save(name: str, folder: Path, **options):
    """The transformers model, written into `folder` with a byte-level tokenizer of 256 ids."""
    import torch
    import transformers

    prefix, arguments = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{prefix}Config")(**arguments)
    model = (
        getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))(config).eval().float()
    )
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms start at 0 and 1, where a mix-up would not show
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return model


def saved_once(folder: Path):
    """get(name) -> (its folder in `folder`, the transformers model), each saved when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = folder / name, save(name, folder / name)
        return made[name]

    return get


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reference_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()


def reference_greedy(model, prompt: list[int], new: int) -> list[int]:
    """Greedy continuation by full recomputation."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(reference_logits(model, np.array([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
