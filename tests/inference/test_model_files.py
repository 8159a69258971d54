"""Folders that are mixed up, damaged, made to harm, or ask for what the decoder has not: the right
value, or one line. Written by hand, without torch; one model runs."""

import json
import struct
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import make_mesh

from taco_jax.config import ConfigError
from taco_jax.inference.loading import in_memory, load_params, open_checkpoint
from taco_jax.inference.sampling import NOT_FINITE, Sampling, greedy, sample
from taco_jax.inference.tensors import INDEX, SINGLE

pytest.importorskip("safetensors", reason="the extra inference: pip install 'taco-jax[inference]'")

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


# Weight files.


def halves(tensors):
    """(two files, their index)."""
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    index = {name: file for file, of in files.items() for name in of}
    return {file: {name: tensors[name] for name in of} for file, of in files.items()}, index


def test_shards_beside_a_single_file_are_of_another_download(tmp_path):
    stale, index = halves(arrays(1))
    folder = write(tmp_path / "model", files=stale | {SINGLE: arrays(0)}, index=index)
    np.testing.assert_array_equal(up(load(folder)), arrays(0)[UP])
    (folder / SINGLE).unlink()
    np.testing.assert_array_equal(up(load(folder)), arrays(1)[UP])


def test_tensors_that_the_index_does_not_name(tmp_path):
    files, index = halves(arrays())
    del index[UP]
    with pytest.raises(ConfigError, match=f"holds the tensor '{UP}', which {INDEX} does not name"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index))
    files, index = halves(arrays())
    next(iter(files.values()))["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    load(write(tmp_path / "buffers", files=files, index=index))  # no weight: nobody misses it


@pytest.mark.parametrize("which", [0, 1])
def test_a_tensor_in_two_shards(tmp_path, which):
    """The index names one; the other may be older, whichever is read last."""
    files, index = halves(arrays())
    shard, other = sorted(files)[which], sorted(files)[1 - which]
    name = next(iter(files[other]))
    files[shard][name] = np.ones((8, 8), np.float32)
    with pytest.raises(ConfigError, match=f"{shard}: holds the tensor '{name}', which {INDEX} says to be in '{other}'"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index))


def test_a_tensor_under_two_names(tmp_path):
    tensors = arrays()
    folder = write(tmp_path / "model", files={SINGLE: tensors | {"norm.weight": tensors["model.norm.weight"]}})
    with pytest.raises(ConfigError, match="one array under two names, (model.)?norm.weight and (model.)?norm.weight"):
        load(folder)


def test_an_index_that_names_a_file_that_cannot_be(tmp_path):
    files, index = halves(arrays())
    with pytest.raises(ConfigError, match=f"there is no such file; {INDEX} names it"):
        open_checkpoint(write(tmp_path / "model", files=files, index=index | {"more": "x" * 300}))


@pytest.mark.parametrize("name", ["../{}", "/tmp/{}", "sub/{}", "..", "", 3, None, "..\\{}"])
def test_an_index_that_names_files_outside_the_folder(tmp_path, name):
    files, index = halves(arrays())
    outside = name.format(index[UP]) if isinstance(name, str) else name
    folder = write(tmp_path / "model", files=files, index=index | {UP: outside})
    with pytest.raises(ConfigError, match=rf"weight_map\['{UP}'\]=.*must be the name of a file in the same folder"):
        open_checkpoint(folder)


def test_a_tied_table_under_either_name(tmp_path):
    tensors = arrays()
    want = load(write(tmp_path / "embed"))["embed"]["table"]
    tensors[HEAD] = tensors.pop(EMBED)
    np.testing.assert_array_equal(load(write(tmp_path / "head", files={SINGLE: tensors}))["embed"]["table"], want)


def test_a_tied_model_that_holds_two_tables(tmp_path):
    """As transformers: equal ones are one; where they differ the config is wrong."""
    tensors = arrays()
    same = open_checkpoint(write(tmp_path / "same", files={SINGLE: tensors | {HEAD: tensors[EMBED]}}))
    assert same.config.tied_head
    other = write(tmp_path / "other", files={SINGLE: tensors | {HEAD: -tensors[EMBED]}})
    params = load(other)
    np.testing.assert_array_equal(params["head"]["kernel"][:, :24], -tensors[EMBED].T)
    np.testing.assert_array_equal(params["embed"]["table"][:24], tensors[EMBED])


@pytest.mark.parametrize("row", [5, 599])
def test_a_tied_model_whose_tables_differ_in_one_row(tmp_path, row):
    table = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
    head = table.copy()
    head[row] += 1
    tensors = arrays() | {EMBED: table, HEAD: head}
    assert not open_checkpoint(write(tmp_path, CONFIG | {"vocab_size": 600}, {SINGLE: tensors})).config.tied_head


@pytest.mark.parametrize("shape", [(24, 9), (23, 8), (24,), ()])
def test_a_tied_model_whose_tables_have_two_shapes(tmp_path, shape):
    folder = write(tmp_path / "model", files={SINGLE: arrays() | {HEAD: np.zeros(shape, np.float32)}})
    with pytest.raises(
        ConfigError, match=r"ties the head to the table, but .* has shape \[24, 8\] and 'lm_head.weight'"
    ):
        open_checkpoint(folder)


# Weights and settings that are no numbers.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite(tmp_path, dtype, value):
    tensors = {name: array.astype(dtype) for name, array in arrays().items()}
    tensors[UP][3, 5] = value
    folder = write(tmp_path / "model", files={SINGLE: tensors})
    with pytest.raises(ConfigError, match=f"{SINGLE}: the tensor '{UP}' holds NaN or infinities"):
        load(folder)


def test_weights_beyond_the_compute_type(tmp_path):
    tensors = arrays()
    tensors[UP][0, 0] = 1e5
    checkpoint = open_checkpoint(write(tmp_path / "model", files={SINGLE: tensors}))
    assert up(load_params(checkpoint, make_mesh(), jnp.bfloat16))[0, 0] == jnp.bfloat16(1e5)
    with pytest.raises(ConfigError, match=f"'{UP}' holds numbers beyond what float16 reaches; use dtype bfloat16"):
        load_params(checkpoint, make_mesh(), jnp.float16)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray])
def test_parameters_in_memory_that_are_not_finite(tmp_path, place):
    checkpoint = open_checkpoint(write(tmp_path / "model"))
    params = load_params(checkpoint, make_mesh(), jnp.float32)
    params["layers"]["mlp"]["up"]["kernel"] = place(np.full((1, 8, 16), np.nan, np.float32))
    with pytest.raises(ConfigError, match="params: the tensor 'layers/mlp/up/kernel' holds NaN or infinities"):
        load_params(in_memory(checkpoint.config, params), make_mesh(), jnp.float32)


def test_logits_that_are_not_finite_are_no_answer(tmp_path):
    """Finite weights whose product is not: the first prompt says it, and so does a server before it is ready."""
    import taco_jax
    from taco_jax.inference.serving.batch_programs import RowPrograms

    tensors = arrays()
    tensors["model.norm.weight"][:] = 3e38
    generator = taco_jax.Generator(write(tmp_path / "model", files={SINGLE: tensors}), dtype="float32")
    message = "prompt 0: the model's logits hold NaN or infinities; its weights, norm_eps or rope_theta are damaged"
    with pytest.raises(ConfigError, match=message):
        list(generator.generate([5, 7], max_tokens=1))
    arguments = generator.config, generator.settings, generator.mesh, generator.programs.params
    assert RowPrograms(*arguments, 1, 2).first_token() == NOT_FINITE


def test_an_evaluation_whose_loss_is_not_finite(tmp_path, monkeypatch):
    from taco_jax.inference import evaluate, perplexity

    library = pytest.importorskip("tokenizers")
    folder, text = write(tmp_path / "model"), tmp_path / "text"
    library.Tokenizer(library.models.BPE({"a": 0}, [])).save(str(folder / "tokenizer.json"))
    text.write_text("aaaa")
    scored = SimpleNamespace(score=lambda settings: SimpleNamespace(loss=float("nan")))
    monkeypatch.setattr(perplexity, "Evaluation", lambda *_: scored)
    with pytest.raises(ConfigError, match=f"--model {folder}: the model's logits hold NaN or infinities"):
        evaluate.perplexity(evaluate.PerplexityConfig(model=str(folder), text=str(text), context=8))


def test_tokens_of_logits_that_are_not_finite():
    logits = np.tile(np.float32([-np.inf, 1, 3, 2]), (4, 1))  # as a table's padding is masked
    logits[1, 0], logits[2, 1], logits[3, :] = np.nan, np.inf, -np.inf
    for tokens in (greedy(logits), sample(logits, np.arange(4), Sampling(0.5, top_k=1).rows(4))):
        assert np.asarray(tokens).tolist() == [2, NOT_FINITE, NOT_FINITE, NOT_FINITE]


def test_the_engine_ends_a_job_whose_logits_are_not_finite():
    """And only that one: its row is free, the engine goes on."""
    from taco_jax.inference.serving.engine import Engine
    from taco_jax.inference.serving.engine_types import Event, Job

    class Programs:
        """Whose token is that of the prompt."""

        batch, longest, params = 1, 8, None

        def empty(self):
            return SimpleNamespace(tokens=np.zeros(1, np.int32)), None

        def put(self, tree):
            return tree

        def insert(self, length):
            return lambda params, state, cache, tokens_1L, *_: (SimpleNamespace(tokens=tokens_1L[:, 0]), cache)

    events, done = [], threading.Event()
    engine = Engine(Programs(), waiting=4)
    engine.start()
    engine.submit([Job([NOT_FINITE], 1, events.append), Job([7], 1, lambda event: (events.append(event), done.set()))])
    assert done.wait(30) and events == [Event(None, "not finite"), Event(7, "length")] and engine.failure is None
    engine.stop()


def test_a_request_whose_logits_are_not_finite_gets_status_500():
    from taco_jax.inference.serving.engine_types import Event, RequestError
    from taco_jax.inference.serving.service import Answer, Service

    service, answer = Service.__new__(Service), Answer.__new__(Answer)
    service._generator, answer._service = SimpleNamespace(settings=SimpleNamespace(dtype="float16")), service
    with pytest.raises(RequestError, match="logits hold NaN or infinities.*float16 reaches: try dtype bf") as error:
        answer._delta(0, Event(None, "not finite"))
    assert error.value.status == 500


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
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor=2.0: this decoder has only plain rotary positions"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.type='linear': this decoder has only rope_scaling.type='default'",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.type='dynamic'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, r"rope_parameters.full_attention=\{"),
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


# Files that claim more than they hold.

DEEP = "[" * 200_000


@pytest.mark.parametrize("file", ["config.json", INDEX, "generation_config.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deeply(tmp_path, file):
    files, index = halves(arrays())
    folder = write(tmp_path / "model", files=files, index=index)
    (folder / file).write_text(DEEP)
    with pytest.raises(ConfigError, match=f"{file}: is nested too deeply"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "file", ["config.json", INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_texts_that_are_too_large_to_be_read(tmp_path, file):
    pytest.importorskip("tokenizers", reason="the extra inference: pip install 'taco-jax[inference]'")
    folder = write(tmp_path / "model", files={} if file == INDEX else None)
    with (folder / file).open("ab") as sparse:
        sparse.truncate(1 << 36)
    with pytest.raises(ConfigError, match=f"^{folder / file}: has {1 << 36} bytes; at most {1 << 28} are read$"):
        open_checkpoint(folder)


def test_templates_whose_names_are_no_texts(tmp_path):
    folder = write(tmp_path / "model")
    templates = [{"name": ["x"], "template": "y"}, {"name": "default", "template": "z"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_checkpoint(folder).template.source == "z"


def test_json_with_half_a_character(tmp_path):
    folder = write(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "\\ud800", "bos_token": "\\ud83d\\ude00"}')
    with pytest.raises(ConfigError, match="tokenizer_config.json: is no JSON file .*surrogates not allowed"):
        open_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "\\ud83d\\ude00"}')
    open_checkpoint(folder)


def test_a_tokenizer_that_is_nested_too_deeply(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"added_tokens":' + DEEP)
    with pytest.raises(ConfigError, match="tokenizer.json: tokenizers cannot read it"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4398046511104]}}',
        b'{"a":' + DEEP.encode(),
    ],
)
def test_safetensors_that_claim_more_than_they_hold(tmp_path, header):
    folder = write(tmp_path / "model")
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ConfigError, match=f"{SINGLE}: is no complete safetensors file"):
        open_checkpoint(folder)


def test_a_safetensors_header_longer_than_its_file(tmp_path):
    folder = write(tmp_path / "model")
    (folder / SINGLE).write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(ConfigError, match=f"{SINGLE}: is no complete safetensors file"):
        open_checkpoint(folder)


# Paths that are no model.


def test_paths_that_are_no_model(tmp_path):
    from taco_jax.config import TrainConfig, to_dict

    model = write(tmp_path / "model")
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(to_dict(TrainConfig())))
    (tmp_path / "some.yaml").write_text("model: x")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "a.gguf").write_text("")
    for path, message in (
        (run, r"first: is the workdir of a training run; from Python taco_jax.Generator.of\(config.model, params\)"),
        (run / "config.json", "config.json: is the config of a training run; from Python taco_jax.Generator.of"),
        (run / "checkpoints", "checkpoints: holds the checkpoints of a training run"),
        (run / "checkpoints" / "3", "3: is a checkpoint of a training run; from Python taco_jax.Generator.of"),
        (run.parent, "runs: holds workdirs of training runs"),
        (model / "config.json", f"config.json: is a file of a model; name its folder: --model {model}"),
        (model / SINGLE, f"is a file of a model; name its folder: --model {model}"),
        (tmp_path / "some.yaml", "some.yaml: is a file of settings; must be a Hugging Face folder"),
        (tmp_path / "ggufs", "has no config.json; name one of its GGUF files: --model .*a.gguf"),
        (tmp_path, f"has no config.json; name a model in it: --model {model}"),
        ("x" * 300, r"--model x+: cannot be read \(File name too long\)"),
        ("~no such user/model", r"--model ~no such user/model: cannot be read \(Could not determine home"),
        ("Qwen/Qwen2.5-0.5B", "there is nothing; if it is a name on the Hugging Face hub, download it first: hf down"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_checkpoint(path)
