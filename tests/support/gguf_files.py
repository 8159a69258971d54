"""Tiny random models as GGUF files: `write(name, folder)`, beside the folder that `checkpoints.save` makes.

Needs the package gguf, and what `checkpoints` needs.
"""

import gguf
import numpy as np
from checkpoints import save

NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
    "o_proj": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip
MERGES = ["a b", "ab c", "Ġ ab"]


def write(name: str, folder, *, quantise: bool = False, **changes):
    """`save(name)` and, beside it, the same as GGUF: (folder, file). `changes` replace what the file says."""
    model = save(name, folder)
    hf, kind = model.config, {"smollm": "llama"}.get(name, name)
    writer = gguf.GGUFWriter(folder / "model.gguf", changes.get("architecture", kind))
    writer.add_block_count(hf.num_hidden_layers)
    writer.add_context_length(hf.max_position_embeddings)
    writer.add_embedding_length(hf.hidden_size)
    writer.add_feed_forward_length(hf.intermediate_size)
    writer.add_head_count(hf.num_attention_heads)
    writer.add_head_count_kv(hf.num_key_value_heads)
    writer.add_key_length(hf.head_dim)
    writer.add_layer_norm_rms_eps(hf.rms_norm_eps)
    writer.add_rope_freq_base((getattr(hf, "rope_parameters", None) or {"rope_theta": 1e4})["rope_theta"])
    from tokenizers import pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "Ġab"]
    words += [f"<unused{i}>" for i in range(hf.vocab_size - len(words) - 1)] + ["<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(words)
    writer.add_token_merges(MERGES)
    writer.add_token_types([1] * (len(words) - 1) + [3])
    writer.add_eos_token_id(len(words) - 1)
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes["rope_freqs"])
    for theirs, weight in model.state_dict().items():
        array, parts = weight.numpy(), theirs.removeprefix("model.").split(".")
        if hf.tie_word_embeddings and parts[0] == "lm_head":
            continue
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        if kind == "llama" and parts[-2] in ("q_proj", "k_proj"):  # as llama.cpp's converter writes them
            heads = hf.num_attention_heads if parts[-2] == "q_proj" else hf.num_key_value_heads
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        stored = f"{prefix}{NAMES[parts[-2]]}.{parts[-1]}"
        if quantise and array.ndim == 2 and array.shape[1] % 32 == 0:
            kind_of = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(array, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder, folder / "model.gguf"
