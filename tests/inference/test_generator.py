"""Generation from checkpoints against `transformers`, batches against single prompts, tp against one device."""

import re

import numpy as np
import pytest
from checkpoints import edit_json, reference_greedy, reference_logits, save
from helpers import make_mesh

import taco_jax
from taco_jax.config import ConfigError
from taco_jax.inference.loading import load_params, open_checkpoint
from taco_jax.models.config import ModelConfig

pytest.importorskip("torch", reason="the reference: pip install 'taco-jax[test]'")
pytest.importorskip("transformers", reason="the reference: pip install 'taco-jax[test]'")

SLOW = pytest.mark.slow
PROMPTS = [[5, 17, 200, 33, 9], [250, 3], list(range(40, 51))]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """name -> (the transformers model, its folder)."""
    cache = {}

    def build(name: str):
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            cache[name] = save(name, folder), folder
        return cache[name]

    return build


@pytest.fixture(scope="module")
def generator(known):
    cache = {}

    def build(name: str, tp: int = 1, **options):
        key = (name, tp, *sorted(options.items()))
        if key not in cache:
            make_mesh(tp=tp)  # skips where there are too few devices
            cache[key] = taco_jax.Generator(known(name)[1], tp=tp, dtype="float32", **options)
        return cache[key]

    return build


def _ids(generator, prompts, **options) -> list[list[int]]:
    rows = [[] for _ in prompts]
    for token in generator.generate(prompts, **options):
        rows[token.row].append(token.id)
    return rows


@pytest.mark.parametrize(
    "name, tp",
    [
        ("gpt2", 4),
        pytest.param("llama", 1, marks=SLOW),  # "smollm" is one
        ("qwen2", 1),
        ("qwen3", 2),
        ("smollm", 3),
        *(pytest.param(name, 1, marks=SLOW) for name in ("gpt2", "qwen3", "smollm")),
    ],
)
def test_logits_of_prompt_and_decode_equal_transformers(known, generator, name, tp):
    model, _ = known(name)
    logits = _all_logits(generator(name, tp), PROMPTS, new=4)
    for prompt, got in zip(PROMPTS, logits):
        ids = [*prompt, *got.argmax(-1)[:-1]]
        want = reference_logits(model, np.array([ids]))[0, len(prompt) - 1 :]
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-6 * np.abs(want).max())


def _all_logits(generator, prompts, new: int) -> np.ndarray:
    """float32[B, new, V]: logits after each prompt, then after each greedy token, as the programs compute them."""
    import jax
    from jax.sharding import PartitionSpec as P

    from taco_jax.inference import cache as kv
    from taco_jax.inference import forward
    from taco_jax.models.params import param_specs

    config, layout = generator.config, generator.programs._prefill_layout
    specs = param_specs(config, generator.mesh.shape["tp"])
    mapped = lambda f, ins: jax.jit(
        jax.shard_map(f, mesh=generator.mesh, in_specs=(specs, *ins), out_specs=(P(), kv.specs()))
    )
    prefill = mapped(lambda p, t, n: forward.prefill(p, t, n, 24, config, layout), (P(), P()))
    decode = mapped(lambda p, t, at, c: forward.decode(p, t, at, c, config, layout), (P(), P(), kv.specs()))
    lengths = np.array([len(p) for p in prompts], np.int32)
    tokens = np.zeros((len(prompts), 16), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    params = generator.programs.params
    logits, cache = prefill(params, tokens, lengths)
    found = [np.asarray(logits)]
    for step in range(new - 1):
        logits, cache = decode(params, found[-1].argmax(-1).astype(np.int32), lengths + step, cache)
        found.append(np.asarray(logits))
    return np.stack(found, 1)


@pytest.mark.parametrize(
    "name, tp",
    [
        pytest.param("qwen3", 4, marks=SLOW),
        ("gpt2", 1),
        pytest.param("smollm", 3, marks=SLOW),
        pytest.param("llama", 2, marks=SLOW),
        pytest.param("qwen2", 4, marks=SLOW),
    ],
)
def test_greedy_batch_equals_transformers_prompt_by_prompt(known, generator, name, tp):
    model, _ = known(name)
    assert _ids(generator(name, tp), PROMPTS, max_tokens=8) == [reference_greedy(model, p, 8) for p in PROMPTS]


def test_sampled_rows_are_the_same_alone_and_in_a_batch(generator):
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    batch = _ids(generator("llama"), PROMPTS, max_tokens=6, **options)
    seed = options.pop("seed")
    alone = [_ids(generator("llama"), [p], max_tokens=6, seed=seed + i, **options)[0] for i, p in enumerate(PROMPTS)]
    assert batch == alone
    assert batch != _ids(generator("llama"), PROMPTS, max_tokens=6, seed=seed + 7, **options)


def test_sampled_text_does_not_depend_on_tp(generator):
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "max_tokens": 6}
    assert _ids(generator("llama", 2), PROMPTS, **options) == _ids(generator("llama"), PROMPTS, **options)


def test_compressed_prompts_send_uint8_and_decode_steps_do_not(generator):
    compressed = generator("llama", 2, compression="int8h")
    assert [len(ids) for ids in _ids(compressed, PROMPTS, max_tokens=4)] == [4, 4, 4]
    tables = {key[0]: table.rows() for key, table in compressed.programs.tables.items()}
    codecs = {kind: {row.site: row.codec for row in rows if row.kind == "activation"} for kind, rows in tables.items()}
    assert codecs["prefill"] == {"embed": "none", "layers/attn/out": "int8h", "layers/mlp/down": "int8h"}
    assert set(codecs["decode"].values()) == {"none"}


def test_ends_at_eos_at_max_tokens_and_at_the_longest_sequence(known, generator, tmp_path):
    model, folder = known("llama")
    first = reference_greedy(model, PROMPTS[0], 3)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    edit_json(tmp_path / "generation_config.json", eos_token_id=[299, first[2]])
    ending = taco_jax.Generator(tmp_path, dtype="float32")
    tokens = list(ending.generate(PROMPTS[0], max_tokens=9))
    assert [t.id for t in tokens] == first[: first.index(first[2]) + 1]
    assert [t.end for t in tokens][-1] == "eos" and not any(t.end for t in tokens[:-1])
    on = list(ending.generate(PROMPTS[0], max_tokens=9, ignore_eos=True))
    assert len(on) == 9 and on[-1].end == "length"
    long = [7] * 60  # of 64
    assert len(list(generator("llama").generate([long, [7]], max_tokens=9))) == 4 + 9


def test_text_comes_in_whole_characters(generator):
    model = generator("llama")
    tokens = list(model.generate("aé", max_tokens=12, temperature=2.0))
    ids = [t.id for t in tokens if t.id < 256]
    assert "".join(t.text for t in tokens).rstrip("�") == model.checkpoint.tokenizer.decode(ids).rstrip("�")
    assert model.encode("aé") == model.checkpoint.tokenizer.encode("aé") and len(model.encode("aé")) == 3
    timing = model.timing
    assert timing.tokens == 12 and timing.rows == 1 and timing.first_token > 0 and timing.tokens_per_second > 0


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ("", {}, "prompt='': has no tokens"),
        ([[]], {}, "has no tokens"),
        ([], {}, "give at least one prompt"),
        ([3, 300], {}, "token id 300 is not in the vocabulary of 300"),
        ([1] * 64, {}, "64 tokens; the model's longest sequence has 64"),
        ("a", {"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ("a", {"temperature": -1}, "temperature=-1: must be 0"),
        ("a", {"top_p": 0}, "top_p=0: must be above 0"),
    ],
)
def test_refusals(generator, prompts, options, message):
    with pytest.raises(ConfigError, match=message):
        generator("llama").generate(prompts, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp": 3}, "4 heads, 2 kv heads: tp 3 does not divide 4.*; try 1, 2 or 4"),
        ({"tp": 16}, "tp 16"),
        ({"compression": "mxpf4"}, "compression='mxpf4' is unknown: did you mean 'mxfp4'"),
        ({"compression": "int4h,blok=32"}, "'blok=32' must be FIELD=VALUE; did you mean 'block'"),
        ({"compression": "int4h,block=33"}, "block=33: must be a power of two"),
        ({"plan": {"layers/mlp/dwon": "int8h"}}, "matches no site: did you mean 'layers/mlp/down'"),
        ({"compression": "taco:"}, "compression='taco:': lacks a codec beside ':'; must be CODEC or FORWARD:BACKWARD"),
        ({"plan": {"layers/mlp/down": ":taco"}}, "plan layers/mlp/down=':taco': lacks a codec beside ':'"),
        ({"compression": "int8h,rounding=stochastic"}, "a layer has no key"),
        ({"compression": 4}, "compression=4: must be a preset's name, a Codec"),
        ({"dtype": "fp8"}, "dtype='fp8': must be one of"),
    ],
)
def test_settings_that_cannot_work(known, options, message):
    with pytest.raises(ConfigError, match=message):
        taco_jax.Generator(known("llama")[1], **options)


def test_old_options_are_refused_with_the_new_spelling():
    given = "min_bytes=0, link='nccl'"
    new = re.escape(f"compression=Compression('mxfp4', {given})")
    with pytest.raises(TypeError, match=f"^Generator: {given}: options are one object now: {new}$"):
        taco_jax.Generator("model", compression="mxfp4", min_bytes=0, link="nccl")
    with pytest.raises(TypeError, match=r"Generator: error_feedback=True: .*Compression\('none', error_feed"):
        taco_jax.Generator.of(ModelConfig(), error_feedback=True)
    with pytest.raises(TypeError, match="Generator: got an unexpected keyword argument 'codec'"):
        taco_jax.Generator("model", codec="mxfp4")


def test_shards_are_all_that_a_device_holds(known):
    checkpoint = open_checkpoint(known("qwen2")[1])
    params = load_params(checkpoint, make_mesh(tp=4), np.float32)
    whole = load_params(checkpoint, make_mesh(), np.float32)
    up = params["layers"]["mlp"]["up"]["kernel"]
    assert {shard.data.shape for shard in up.addressable_shards} == {(2, 48, 24)}
    np.testing.assert_array_equal(up, whole["layers"]["mlp"]["up"]["kernel"])
