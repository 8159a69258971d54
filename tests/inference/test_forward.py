"""The forward pass with a kv cache against full recomputation, and what its layout sends; needs nothing but jax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from jax.sharding import PartitionSpec as P
from model_helpers import CONFIGS, GEMMA, QWEN2, WINDOWS, Run

from taco_jax import CODECS
from taco_jax.collectives import comm_log
from taco_jax.compression.compression import Compression
from taco_jax.config import ConfigError
from taco_jax.inference import cache as kv
from taco_jax.inference import forward
from taco_jax.inference.perplexity import Evaluation
from taco_jax.inference.settings import Settings

LENGTHS = np.array([5, 9, 1], np.int32)
SLOTS, NEW = 16, 5


FUNCTIONS = {}


def _functions(run: Run, settings: Settings):
    """jitted (prefill, decode) on the run's mesh; made once for equal arguments."""
    key = run, repr(settings)
    if key not in FUNCTIONS:
        FUNCTIONS[key] = _make_functions(run, settings)
    return FUNCTIONS[key]


def _make_functions(run: Run, settings: Settings):
    config, device = run.config, run.mesh.devices.flat[0]
    layouts = [settings.layout(config, device, decoding=decoding) for decoding in (False, True)]
    mapped = lambda f, ins, **options: jax.jit(
        jax.shard_map(f, mesh=run.mesh, in_specs=(run.specs, *ins), out_specs=(P(), kv.specs())), **options
    )
    prefill = lambda p, t, n: forward.prefill(p, t, n, SLOTS, config, layouts[0])
    decode = lambda p, t, at, c: forward.decode(p, t, at, c, config, layouts[1])
    return mapped(prefill, (P(), P())), mapped(decode, (P(), P(), kv.specs()), donate_argnums=3)


SLOW = pytest.mark.slow


# kv heads are replicated at qwen2 tp 4 and qwen3 tp 8.
@pytest.mark.parametrize(
    "name, tp",
    [
        ("qwen2", 4),
        ("gpt2", 2),
        ("gemma", 2),
        *(pytest.param(*case, marks=SLOW) for case in (("windows", 4), ("qwen3", 8), ("llama", 1), ("gemma", 8))),
    ],
)
def test_decode_equals_full_recomputation(name, tp):
    run = Run((CONFIGS | {"gemma": GEMMA, "windows": WINDOWS})[name], tp=tp, batch=3, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0]
    want = run.logits(params, tokens)
    prefill, decode = _functions(run, Settings(tp, dtype="float32"))
    rows = np.arange(3)
    logits, cache = prefill(params, tokens[:, :10], LENGTHS)  # what lies behind a prompt must not matter
    np.testing.assert_allclose(logits, want[rows, LENGTHS - 1], atol=1e-6)
    for position in range(NEW):
        at = LENGTHS + position
        given = cache
        logits, cache = decode(params, tokens[rows, at], at, given)
        np.testing.assert_allclose(logits, want[rows, at], atol=1e-6, err_msg=f"token {position}")
        assert given.keys.is_deleted()


def test_a_position_beyond_the_last_slot_changes_nothing():
    cache = kv.KVCache(*(jnp.zeros((1, 2, 4, 1, 2)),) * 2)
    new = jnp.ones((2, 1, 1, 2))
    written = kv.write(cache, jnp.int32(0), jnp.array([4, 1]), new, new)
    assert float(written.keys[:, 0].sum()) == 0 and written.values[0, 1, :, 0, 0].tolist() == [0, 1, 0, 0]


PLAN = {"layers/0/mlp/*": "int8h", "layers/mlp/down": "int6h,block=64", "layers/0/attn/out": None}


@pytest.mark.slow
def test_layers_may_send_differently():
    run = Run(QWEN2, tp=4, batch=2, length=32)
    params, tokens = run.params(), run.batch_arrays()[0]
    prefill, _ = _functions(run, Settings(4, Compression("mxfp4", min_bytes=0), PLAN, "float32"))
    with comm_log.record() as table:
        lowered = prefill.lower(params, tokens[:, :SLOTS], LENGTHS[:2])
    rows = {row.site: row for row in table.rows() if row.kind == "activation"}
    assert {site: row.codec for site, row in rows.items()} == {
        "embed": "none", "layers/0-0/attn/out": "none", "layers/0-0/mlp/down": "int8h",
        "layers/1-1/attn/out": "mxfp4", "layers/1-1/mlp/down": "int6-64-hadamard-bfloat16", "error": "none",
    }  # fmt: skip
    assert rows["error"].elements == 2 * QWEN2.d_model  # a position of each row
    sent = sorted(size for _, dtype, size in collectives(lowered.compile()) if dtype == "uint8")
    assert sent == sorted(size for row in rows.values() for _, dtype, size in row.hlo if dtype == "uint8")
    assert len(sent) == 6  # two hops of each compressed site


@pytest.mark.parametrize("codec", ["int8h", pytest.param("mxfp4,block=16,scale=ue5m3", marks=SLOW)])
def test_logits_with_compressed_sums_are_near_and_not_equal(codec):
    run = Run(QWEN2, tp=4, batch=3, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0]
    exact, _ = _functions(run, Settings(4, dtype="float32"))[0](params, tokens[:, :10], LENGTHS)
    logits, _ = _functions(run, Settings(4, Compression(codec, min_bytes=0), dtype="float32"))[0](
        params, tokens[:, :10], LENGTHS
    )
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < (0.03 if codec == "int8h" else 0.25)


def test_feedback_leaves_less_error_in_the_logits_and_decode_messages_stay_exact():
    run = Run(dataclasses.replace(QWEN2, n_layers=8), tp=4, batch=3, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0]
    of = lambda *codec, **o: _functions(run, Settings(4, Compression(*codec, **o), dtype="float32"))
    exact, cache = of("none")[0](params, tokens[:, :10], LENGTHS)
    error = {}
    for feedback in (False, True):
        logits, _ = of("mxfp4", min_bytes=0, error_feedback=feedback)[0](params, tokens[:, :10], LENGTHS)
        error[feedback] = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    # 0.026 of it here; 0.13 if the error went from the attention to the mlp alone, and not from layer to layer.
    assert error[True] < 0.06 * error[False]
    decode = of("mxfp4", error_feedback=True)[1]
    with comm_log.record() as table:
        decode.lower(params, tokens[:, 10], LENGTHS, cache)
    assert {row.site: row.codec for row in table.rows() if row.kind == "activation"} == {
        "embed": "none", "layers/attn/out": "none", "layers/mlp/down": "none",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, batch, codec",
    [
        ("windows", 3, "mxfp4"),  # parts of the sequence
        pytest.param("qwen2", 4, "mxfp4", marks=SLOW),  # of the batch
        pytest.param("gemma", 1, "none", marks=SLOW),
        pytest.param("gpt2", 1, "int4h", marks=SLOW),
    ],
)
def test_chains_of_a_prompt_find_what_one_does(name, batch, codec, monkeypatch):
    """Values are quantised token by token, with the errors of the sums before: logits and caches are those of one."""
    monkeypatch.setattr(forward, "LAYERS_A_BODY", 3)  # of four layers one is left over
    biased = dataclasses.replace(WINDOWS, out_bias=True, mlp_bias=True)
    run = Run((CONFIGS | {"gemma": GEMMA, "windows": biased})[name], tp=2, batch=batch, length=SLOTS)
    params, tokens, lengths = run.params(), run.batch_arrays()[0], np.arange(SLOTS, SLOTS - batch, -1, np.int32)
    fed = None if codec == "none" else True
    settings = Settings(2, Compression(codec, min_bytes=0, error_feedback=fed), dtype="float32")
    found, tables = [], []
    for chains in (1, 2):
        prefill, _ = _functions(run, dataclasses.replace(settings, chains=chains))
        found.append(jax.tree.map(np.asarray, prefill(params, tokens, lengths)))
        with comm_log.record() as table:
            _make_functions(run, dataclasses.replace(settings, chains=chains))[0].lower(params, tokens, lengths)
        tables.append({row.site: row for row in table.rows() if row.site.startswith("layers/")})
    for one, two in zip(*map(jax.tree.leaves, found)):
        np.testing.assert_allclose(two, one, rtol=2e-4, atol=2e-5)
    for site, row in tables[0].items():
        assert tables[1][site].calls == 2 * row.calls and 2 * tables[1][site].elements == row.elements


def test_what_cannot_be_cut_and_small_prompts_are_one_chain():
    layout = Settings(2, "taco", dtype="float32", chains=2).layout(QWEN2, jax.devices()[0], decoding=False)
    chains = lambda *shape: tuple(layout.chains_of(QWEN2, *shape))
    assert [chains(4, 15), chains(3, 16), chains(3, 15)] == [(2, 0), (2, 1), (1, 0)]
    small = layout._replace(chain_bytes=16 * QWEN2.d_model * 4)
    assert [tuple(small.chains_of(QWEN2, 1, n)) for n in (30, 32)] == [(1, 0), (2, 1)]
    # The emulator has no link.
    assert Settings(2, "taco").layout(QWEN2, jax.devices()[0], decoding=False).chains == 1
    assert Settings(2, "taco", chains=2).layout(QWEN2, jax.devices()[0], decoding=True).chains == 1
    for wrong in (0, "2", True, 1.0):
        with pytest.raises(ConfigError, match=f"chains={wrong!r}: must be a whole number"):
            Settings(2, chains=wrong)


@pytest.mark.slow
def test_perplexity_sees_the_last_position_as_prefill_does():
    """The same errors are fed back and the last one is delivered, so that the table says what generation gets."""
    run = Run(QWEN2, tp=4, batch=1, length=SLOTS)
    params, tokens = run.params(), run.batch_arrays()[0][0]
    settings = Settings(4, Compression("int4h", min_bytes=0, error_feedback=True), dtype="float32")
    ids = [*tokens.tolist(), 7]
    score = Evaluation(QWEN2, run.mesh, params, ids, SLOTS).score(settings)
    logits, _ = _functions(run, settings)[0](params, tokens[None], np.array([SLOTS], np.int32))
    wanted = jax.nn.logsumexp(logits[0]) - logits[0, 7]
    assert score.nll[-1] == pytest.approx(float(wanted), abs=1e-5)
    without = dataclasses.replace(settings.compression, error_feedback=False)
    without = Evaluation(QWEN2, run.mesh, params, ids, SLOTS).score(dataclasses.replace(settings, compression=without))
    assert abs(score.nll[-1] - without.nll[-1]) > 1e-3
    assert score.sent == without.sent  # the last message is of one position, and not of these sites


@pytest.mark.parametrize("codec, link, feedback", [
    ("int4h", "auto", True), ("mxfp6", "nccl", True), ("tah4", "auto", True), ("int4h", "nvlink", False),
    ("int8h", "auto", False), ("taco", "auto", False), ("int8_token", "auto", False),
])  # fmt: skip
def test_feedback_is_for_less_than_eight_bits(codec, link, feedback):
    settings = lambda **o: Settings(4, Compression(codec, link=link, **o))
    of = lambda **o: settings(**o).layout(QWEN2, jax.devices()[0], decoding=False).par
    assert of().compression("layers/mlp/down").error_feedback is feedback
    if link != "nvlink":
        assert of(error_feedback=not feedback).compression("layers/mlp/down").error_feedback is not feedback
    else:
        with pytest.raises(ValueError, match="error_feedback=True: link='nvlink' knows no errors"):
            of(error_feedback=True)


def test_feedback_is_not_for_sums_that_are_normalised():
    of = lambda **o: Settings(4, Compression("int4h", **o)).layout(GEMMA, jax.devices()[0], decoding=False)
    assert of().par.compression("layers/mlp/down").error_feedback is False
    with pytest.raises(ConfigError, match="error_feedback=True: the model normalises its sums"):
        of(error_feedback=True)


def test_feedback_is_not_by_itself_where_sums_leave_no_error():
    for field in ({"algorithm": "hierarchical"}, {"between_hosts": "int8h"}, {"with_product": True}):
        layout = Settings(4, Compression("int4h", **field)).layout(QWEN2, jax.devices()[0], decoding=False)
        assert layout.par.compression("layers/mlp/down").error_feedback is False


def test_codecs_of_a_plan_share_the_other_options_of_the_compression():
    plan = {"layers/0/mlp/down": "int8h", "layers/0/attn/out": Compression("int8h"), "layers/1/mlp/down": None}
    options = {"link": "nccl", "min_bytes": 7, "chunks": 2}
    for codec in ("mxfp4", "none"):
        layout = Settings(2, Compression(codec, **options), plan).layout(QWEN2, jax.devices()[0], decoding=False)
        found = dict(layout.par.plan)
        shared = Compression("int8h", error_feedback=False, **options)
        assert found["layers/0-0/mlp/down"] == shared
        assert found["layers/0-0/attn/out"] == Compression("int8h", error_feedback=False)
        assert found["layers/1-1/mlp/down"] is None
        rest = found["layers/1-1/attn/out"]
        assert rest is None if codec == "none" else (rest.link, rest.min_bytes, rest.chunks) == ("nccl", 7, 2)


def test_one_setting_is_one_segment_under_the_decoder_s_own_names():
    layout = Settings(2, "taco").layout(QWEN2, jax.devices()[0], decoding=False)
    assert [segment.sites_of for segment in layout.segments] == ["layers"]
    assert layout.par.compression("layers/mlp/down").codecs[0] == CODECS["taco"]
    assert set(layout.scales()) == {"layers/attn/out", "layers/mlp/down"}  # a scale of ue5m3: the site scale is 1
    decoding = Settings(2, "taco").layout(QWEN2, jax.devices()[0], decoding=True)
    assert decoding.par.compression("layers/mlp/down").min_bytes == 1 << 16
    forced = Settings(2, Compression("taco", min_bytes=0)).layout(QWEN2, jax.devices()[0], decoding=True)
    assert forced.par.compression("layers/mlp/down").min_bytes == 0


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ConfigError, match="'layers/9/mlp/down' matches no site: did you mean 'layers/"):
        Settings(2, plan={"layers/9/mlp/down": "taco"}).layout(QWEN2, jax.devices()[0], decoding=False)
