"""The decoder on emulated meshes against itself on one device: gradients, messages, parameters, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import collectives
from model_helpers import (
    CONFIGS,
    GPT2,
    LLAMA,
    QWEN2,
    Run,
    assert_gradients_close,
    by_path,
    check_decoder,
    reference_gradients,
    unpadded,
)

from taco_jax.models import decoder
from taco_jax.models.config import valid_tp, validate
from taco_jax.models.presets import PRESETS, preset
from taco_jax.models.run_config import Parallel

SLOW = pytest.mark.slow


# On every change every value at least once but llama, which has no part that others lack; every night with every other.
# kv heads are replicated at qwen2 tp 4 and 8, qwen3 tp 8.
@pytest.mark.parametrize(
    "name, tp, dp, sequence_parallel, remat",
    [
        ("qwen2", 4, 2, True, "dots"),
        ("qwen3", 2, 1, False, "none"),
        ("gpt2", 2, 2, True, "full"),
        pytest.param("llama", 8, 1, True, "dots", marks=SLOW),
    ],
)
def test_gradients_equal_those_of_one_device(name, tp, dp, sequence_parallel, remat):
    check_decoder(Run(CONFIGS[name], tp=tp, dp=dp, sequence_parallel=sequence_parallel, remat=remat))


# Their messages are counted below.
PLAIN = Run(QWEN2, tp=4, dp=2, remat="full", codec="taco")
PARALLEL = Run(QWEN2, tp=4, dp=2, sequence_parallel=True, remat="dots", codec="taco")
TIED = Run(GPT2, tp=4, sequence_parallel=True, remat="full", codec="taco")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(PLAIN, marks=SLOW, id="qwen2"),
        pytest.param(PARALLEL, marks=SLOW, id="qwen2-sequence_parallel"),
        pytest.param(TIED, marks=SLOW, id="gpt2-sequence_parallel"),
        pytest.param(Run(QWEN2, tp=4, sequence_parallel=True, remat="dots", codec="int8h"), marks=SLOW, id="int8h"),
        pytest.param(Run(CONFIGS["qwen3"], tp=8, sequence_parallel=True, codec="e4m3h"), marks=SLOW, id="e4m3h"),
        pytest.param(Run(GPT2, tp=8, codec="taco"), marks=SLOW, id="gpt2"),
    ],
)
def test_compressed_gradients(run):
    amax = check_decoder(run)
    for site, slot in amax.items():
        forward = site in ("embed", "layers/attn/out", "layers/mlp/down")
        # Without sequence parallelism each site has a message in one direction only.
        assert np.all((slot[..., 0, 0] > 0) == (run.sequence_parallel or forward)), site
        assert np.all((slot[..., 1, 0] > 0) == (run.sequence_parallel or not forward)), site


def test_site_scales_reach_the_codec():
    # Block scales of activations lie near 2^-9 here, of gradients near 2^-17: these exponents fit, absurd ones clip.
    check_decoder(dataclasses.replace(PLAIN, exponents=(-8, -16)))
    with pytest.raises(AssertionError, match="error|Not equal"):
        check_decoder(dataclasses.replace(PLAIN, exponents=(-60, -60)))


@SLOW
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp, dp", [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_full_product(name, tp, dp, sequence_parallel, remat):
    check_decoder(Run(CONFIGS[name], tp=tp, dp=dp, sequence_parallel=sequence_parallel, remat=remat))


@SLOW
@pytest.mark.parametrize("codec", ["taco", "e4m3h", "int8h", "mxint8"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp, dp", [(2, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("name", CONFIGS)
def test_compressed_gradients_full_product(name, tp, dp, sequence_parallel, codec):
    check_decoder(Run(CONFIGS[name], tp=tp, dp=dp, sequence_parallel=sequence_parallel, codec=codec, remat="full"))


@SLOW
@pytest.mark.parametrize("name", CONFIGS)
def test_int4_gradients_are_printed(name, capsys):
    _, want = reference_gradients(CONFIGS[name])
    _, got, _ = Run(CONFIGS[name], tp=4, codec="int4h").gradients()
    with capsys.disabled():
        for path, leaf in want.items():
            print(f"{name} int4h {path}: {np.linalg.norm(got[path] - leaf) / max(np.linalg.norm(leaf), 1e-9):.1%}")


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", pytest.param("llama", marks=SLOW)])
def test_every_leaf_has_a_gradient(name):
    for path, leaf in reference_gradients(CONFIGS[name])[1].items():
        whole = name == "gpt2" and path == "layers/attn/k/bias"  # softmax does not see a shift of all scores
        assert whole or np.abs(leaf).max() > 1e-7, path


# Vocabularies of 300 ids need padding too, as all models above have.
@SLOW
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
def test_vocabulary_that_needs_padding(config, tp):
    config = dataclasses.replace(config, vocab_size=50_257, d_model=16, n_layers=1, d_mlp=32)
    check_decoder(Run(config, tp=tp, sequence_parallel=tp == 4))


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(PARALLEL, id="sequence_parallel"),
        *(
            pytest.param(
                dataclasses.replace(run, remat=remat, dtype=jnp.bfloat16), marks=SLOW,
                id=f"{run.sequence_parallel}-{remat}-bfloat16",
            )
            for run in (PLAIN, PARALLEL) for remat in ("none", "dots", "full")
        ),
    ],
)  # fmt: skip
def test_messages(run):
    compiled, table = run.compiled()
    found = collectives(compiled)
    sent = [message for message in found if message[1] == "uint8"]
    # None runs twice, whatever is recomputed: two sites forward and two backward in a layer, embedding and head beside
    # it; each is an all_to_all and an all_gather, or under sequence parallelism one of them in each direction.
    assert sum(opcode == "all-to-all" for opcode, _, _ in sent) == 6
    assert sum(opcode == "all-gather" for opcode, _, _ in sent) == 6
    # All else is exact, listed, and small: gradients of replicated weights over tp and the statistics of the loss. This
    # test itself adds the sum of the gradients over dp, the maximum of the amax slots and two scalars.
    uncompressed = sum(elements for _, dtype, elements in found if dtype != "uint8")
    listed = sum(row.elements for row in table.rows() if row.kind == "other")
    gradients = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(run.params()))
    slots = sum(scales.slot.size for scales in run.state().values())
    assert uncompressed == listed + gradients + slots + 2
    # The table is what was compiled.
    assert sent == sorted(hlo for row in table.rows() if row.kind == "activation" for hlo in row.hlo)
    calls = {(row.site, row.direction): row.calls for row in table.rows() if row.kind == "activation"}
    assert {site for site, _ in calls} == set(decoder.site_names(QWEN2, 4))
    assert all(n == (QWEN2.n_layers if site.startswith("layers/") else 1) for (site, _), n in calls.items())
    exact = {row.site for row in table.rows() if row.kind == "other"}
    assert {"head/softmax", "layers/attn/k/kernel/grad", "layers/attn/v/bias/grad"} <= exact
    assert ("final_norm/scale/grad" in exact) == run.sequence_parallel


def test_logits_never_exist_at_once():
    config = dataclasses.replace(LLAMA, vocab_size=4096)
    run = Run(config, tp=2, loss_chunk=8, batch=4, length=32, remat="full")
    text = run.compiled()[0].as_text()
    assert "[8,2048]" in text
    assert not any(f"[{tokens},2048]" in text or f"[{tokens},4096]" in text for tokens in ("128", "4,32", "16,8"))


def test_all_ranks_hold_the_same_replicated_gradients():
    _, gradients, _ = PARALLEL.outputs()
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        shards = {str(shard.index): np.asarray(shard.data) for shard in leaf.addressable_shards}
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shards[str(shard.index)], shard.data, err_msg=str(path))


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32():
    """Gradients of what every rank has are summed in float32."""
    run = Run(QWEN2, tp=8, dtype=jnp.bfloat16, sequence_parallel=True, remat="full")
    loss, gradients, _ = run.gradients()
    want_loss, want = reference_gradients(QWEN2)
    np.testing.assert_allclose(loss, want_loss, rtol=2e-3)
    assert all(leaf.dtype == np.float32 for leaf in gradients.values())
    assert_gradients_close(gradients, want, exact=False)
    found = collectives(run.compiled()[0])
    assert {dtype for opcode, dtype, _ in found if opcode == "all-reduce"} == {"float32"}


@pytest.mark.slow
def test_parameters_do_not_depend_on_tp():
    for config in (QWEN2, GPT2):
        want = by_path(unpadded(decoder.init_params(config, jax.random.key(3), 1), config))
        padded = decoder.init_params(config, jax.random.key(3), 4)
        assert padded["embed"]["table"].shape[0] == 512 and not padded["embed"]["table"][config.vocab_size :].any()
        got = by_path(unpadded(padded, config))
        for path, leaf in want.items():
            np.testing.assert_array_equal(got[path], leaf, err_msg=path)


def test_initial_values():
    config = dataclasses.replace(QWEN2, d_model=64, d_mlp=256, n_layers=8)
    params = by_path(jax.jit(decoder.init_params, static_argnums=0)(config, jax.random.key(0)))
    assert params["layers/mlp/up/kernel"].std() == pytest.approx(0.02, rel=0.05)
    assert params["layers/mlp/down/kernel"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert params["layers/attn/out/kernel"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert np.all(params["layers/attn_norm/scale"] == 1) and not params["layers/attn/q/bias"].any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_specs_fit_the_parameters(name, tp):
    shapes = jax.eval_shape(lambda: decoder.init_params(CONFIGS[name], jax.random.key(0), tp))

    def check(shape, spec):
        assert len(spec) <= len(shape.shape)
        assert all(size % tp == 0 for size, axis in zip(shape.shape, spec) if axis)

    jax.tree.map(check, shapes, decoder.param_specs(CONFIGS[name], tp))
    sharded = {path for path, spec in _spec_paths(CONFIGS[name], tp) if any(spec)}
    assert ("layers/attn/k/kernel" in sharded) == (CONFIGS[name].n_kv_heads % tp == 0)
    assert {"embed/table", "layers/mlp/down/kernel", "layers/attn/q/kernel"} <= sharded


def _spec_paths(config, tp):
    specs = decoder.param_specs(config, tp)
    is_spec = lambda node: isinstance(node, jax.sharding.PartitionSpec)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        yield "/".join(entry.key for entry in path), spec


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("gpt2_124m", 124_439_808),
        ("gpt2_350m", 354_823_168),
        ("gpt2_1p5b", 1_557_611_200),
        ("qwen2_0p5b", 494_032_768),
        ("qwen2p5_7b", 7_615_616_512),
        ("qwen3_0p6b", 596_049_920),
        ("smollm2_135m", 134_515_008),
        ("tinyllama_1p1b", 1_100_048_384),
    ],
)
def test_presets_have_the_published_sizes(name, parameters):
    assert decoder.count_params(preset(name)) == parameters


def test_presets():
    assert decoder.count_params(preset("gpt3_6p7b")) == pytest.approx(6.7e9, rel=0.01)
    assert valid_tp(preset("gpt2_1p5b")) == (1, 5, 25)
    assert {2, 4} < set(valid_tp(preset("gpt2_1p5b_24h")))
    assert valid_tp(preset("qwen2p5_7b")) == (1, 2, 4)
    for config in PRESETS.values():
        validate(config, 1)
    with pytest.raises(ValueError, match="'qwen2.5_7b'.*did you mean 'qwen2p5_7b'"):
        preset("qwen2.5_7b")


@pytest.mark.parametrize(
    "change, tp, message",
    [
        ({}, 8, "28 heads, 4 kv heads: tp 8 does not divide 28; try 1, 2 or 4"),
        ({}, 7, "28 heads, 4 kv heads: tp 7 neither divides 4 nor is a multiple of it.*; try 1, 2 or 4"),
        ({"d_mlp": 18_946}, 4, "mlp width 18946: tp 4 does not divide 18946; try 1 or 2"),
        ({}, 0, "tp=0: must be at least 1; try 1, 2 or 4"),
    ],
)
def test_tp_that_does_not_fit(change, tp, message):
    config = dataclasses.replace(preset("qwen2p5_7b"), **change)
    for function in (validate, decoder.param_specs, decoder.site_names):
        with pytest.raises(ValueError, match=message):
            function(config, tp)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_kv_heads": 3}, "n_kv_heads=3: must divide n_heads=8; try 1, 2, 4 or 8"),
        ({"norm": "batchnorm"}, "norm='batchnorm': must be one of rmsnorm, layernorm"),
        ({"activation": "mish"}, "activation='mish': must be one of silu, gelu, gelu_tanh, relu"),
        ({"n_layers": 0}, "n_layers=0: must be an integer of at least 1"),
        ({"head_dim": 7}, "head_dim=7: must be even with positions='rope'; try 8"),
    ],
)
def test_configs_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QWEN2, **change)


def test_sequences_that_do_not_fit():
    with pytest.raises(ValueError, match="length 18: sequence parallelism needs tp 4 to divide it; try 16 or 20"):
        Run(QWEN2, tp=4, sequence_parallel=True, length=18).gradients()
    with pytest.raises(ValueError, match="length 80: the learned positions end at max_length=64; use at most that"):
        Run(GPT2, length=80).gradients()


def test_parallel_settings():
    plan = {"embed": None}
    assert Parallel(plan=plan) == Parallel(plan=tuple(plan.items())) and hash(Parallel(plan=plan))
    with pytest.raises(KeyError, match="site 'head' is not in the plan, which has embed"):
        Parallel(plan=plan).compression("head")
    with pytest.raises(ValueError, match="remat='some': must be one of none, dots, full"):
        Parallel(remat="some")
    with pytest.raises(ValueError, match="loss_chunk=0: must be at least 1"):
        Parallel(loss_chunk=0)
    with pytest.raises(ValueError, match="chains=0: must be an int of at least 1"):
        Parallel(chains=0)
