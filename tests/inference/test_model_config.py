"""Keys of config.json, and which ids end a text: used, without effect, or refused by name."""

import json
import time

import pytest
from model_folders import CONFIG, write

from taco_jax.config import ConfigError
from taco_jax.inference.loading import open_checkpoint

pytest.importorskip("safetensors", reason="the extra inference: pip install 'taco-jax[inference]'")


# Keys of config.json.


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rms_norm_eps": float("nan")}, "norm_eps=nan: must be at least 0 and below 1, such as 1e-06"),
        ({"rms_norm_eps": -1e-5}, "norm_eps=-1e-05: must be at least 0"),
        ({"rms_norm_eps": 1e9}, "norm_eps=1000000000.0: must be at least 0 and below 1"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=a number of 1329 bits: must be one that a float holds"),
        ({"rope_theta": 10**400}, "rope_theta=a number of 1329 bits"),
        ({"rope_theta": 0}, "rope_theta=0.0: must be at least 1 and below 1e\\+38, such as 10000.0"),
        ({"rope_theta": 1e39}, "rope_theta=1e\\+39: must be at least 1 and below 1e\\+38"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: must be at least 1"),
        (
            {"rope_scaling": {"factor": 2.0}},
            "rope_scaling.factor=2.0: rope_type='default' takes nothing beside rope_theta; is of linear",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.type='longrope': this decoder has default, linear, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type='dynamic'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, r"rope_parameters.full_attention=\{"),
        ({"model_type": "gemma3_text", "rope_parameters": {"full": {}}}, "rope_parameters.full: its keys must be"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: this decoder has only partial_rotary_factor=1"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types\[0\]='sliding_attention': this decoder has only"),
        ({"is_causal": False}, "is_causal=False: this decoder has only is_causal=True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers='1': must be a whole number"),
        ({"num_attention_heads": True}, "num_attention_heads=True: must be a whole number"),
        ({"num_key_value_heads": 0}, "n_kv_heads=0: must be an integer of at least 1"),
        ({"num_attention_heads": 0}, "n_heads=0: must be an integer of at least 1"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but the files hold 11 tensors in all"),
        ({"vocab_size": 10**9}, "says a vocabulary of 1000000000, but the largest dimension of any tensor is 24"),
        ({"hidden_size": 10**9}, "says a width of 1000000000"),
        ({"intermediate_size": 10**9}, "says an mlp width of 1000000000"),
        ({"num_attention_heads": 10**9, "head_dim": 4}, "says heads that are together as wide as 4000000000"),
        ({"num_attention_heads": 10**9 + 7, "head_dim": 4}, "must divide n_heads=1000000007; try 1 or 1000000007"),
        ({"num_hidden_layers": 10**4000}, "n_layers=a number of 13288 bits: must be at most 2147483647"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True"),
        ({"model_type": "gpt2", "n_head": 4}, "num_attention_heads=2: is another name of n_head=4; keep the right one"),
        ({"model_type": "gpt2", "n_layer": 2}, "num_hidden_layers=1: is another name of n_layer=2"),
    ],
)
def test_keys_of_a_config(tmp_path, changes, message):
    folder, begin = write(tmp_path / "model", CONFIG | changes), time.process_time()
    with pytest.raises(ConfigError, match=message) as error:
        open_checkpoint(folder)
    assert str(error.value).startswith(str(folder / "config.json")) and "\n" not in str(error.value)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    "changes, field, value",
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_theta", 1e6),
        ({"rope_theta": 500000, "rope_scaling": None}, "rope_theta", 5e5),
        # As in transformers, rope_scaling takes the place of all that rope_parameters says.
        (
            {"rope_theta": 2e4, "rope_parameters": {"rope_theta": 3e4}, "rope_scaling": {"type": "default"}},
            "rope_theta",
            2e4,
        ),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_theta": 3e4}, "rope_scaling": {}}, "rope_theta", 3e4),
        ({"rope_scaling": {"type": "default"}, "sliding_window": 4096, "attention_dropout": 0.1}, "rope_theta", 1e4),
        ({"num_key_value_heads": None, "head_dim": None, "layer_types": ["full_attention"]}, "n_kv_heads", 2),
    ],
)
def test_keys_that_are_used_or_change_nothing(tmp_path, changes, field, value):
    assert getattr(open_checkpoint(write(tmp_path / "model", CONFIG | changes)).config, field) == value


# Which ids end a text.


@pytest.mark.parametrize(
    "config, generation, tokenizer, ends",
    [
        (23, None, None, {23}),
        (23, {"eos_token_id": [21, 22]}, None, {21, 22, 23}),
        (23, {"eos_token_id": None}, "<end>", {0, 23}),
        (None, {}, {"content": "<end>"}, {0}),
        (None, None, "<absent>", set()),
    ],
)
def test_every_file_that_names_an_end_counts(tmp_path, config, generation, tokenizer, ends):
    library = pytest.importorskip("tokenizers")
    folder = write(tmp_path / "model", CONFIG | {"eos_token_id": config})
    library.Tokenizer(library.models.BPE({"<end>": 0}, [])).save(str(folder / "tokenizer.json"))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / file).write_text(json.dumps({"eos_token": tokenizer}))
        assert open_checkpoint(folder).eos == ends
        (folder / file).unlink()


def test_tokens_that_only_a_file_beside_the_tokenizer_calls_special(tmp_path):
    """As in transformers: such a token is one id, has no text, and is no user's to write."""
    library, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    folder = write(tmp_path / "model")
    words = {word: i for i, word in enumerate(["a", "<", "s", ">", "<s>", "/", "</s>"])}
    made = library.Tokenizer(library.models.BPE(words, []))
    plain = lambda text: library.AddedToken(text, special=False, normalized=False)
    made.add_tokens([plain("<turn>"), plain("<think>")])
    made.save(str(folder / "tokenizer.json"))
    turn = {"content": "<turn>", "special": True, "normalized": False}
    turn |= dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"pad_token": "<absent>", "added_tokens_decoder": {"7": turn}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours, text = open_checkpoint(folder).tokenizer, "<s>a<turn><think></s>"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids == [4, 0, 7, 8, 6]
    assert [ours.bytes_of(i) == b"" for i in (4, 7, 8, 6)] == [True, True, False, True]
    assert ours.id_of("<absent>") is None and ours.library.get_vocab_size() == 9
    more = {"additional_special_tokens": ["<think>", {"content": 5}, 3], "added_tokens_decoder": [turn]}
    (folder / "tokenizer_config.json").write_text(json.dumps(more))
    special = {
        i: token.special for i, token in open_checkpoint(folder).tokenizer.library.get_added_tokens_decoder().items()
    }
    assert special == {7: False, 8: True}


@pytest.mark.parametrize("said", ["2", [1.5], True, {}])
def test_ends_that_are_no_ids(tmp_path, said):
    with pytest.raises(ConfigError, match="eos_token_id=.*: must be a token id, or a list of them"):
        open_checkpoint(write(tmp_path / "model", CONFIG | {"eos_token_id": said}))
