"""The training step: one curve on every mesh, the same bits on every run, and only the messages that are listed."""

import dataclasses

import jax
import numpy as np
import programs
import pytest
from hlo import collectives
from model_helpers import compare_replicas

from taco_jax.codec import CODECS, UNCALIBRATED
from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataConfig,
    DataParallelConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from taco_jax.mesh import make_mesh
from taco_jax.train.site_plan import resolve_plan
from taco_jax.train.site_stats import summarise_stats
from taco_jax.train.step import build

MODEL = ModelConfig(
    vocab_size=300, d_model=64, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, d_mlp=128, qkv_bias=True, max_length=64
)
CONFIG = TrainConfig(
    model=MODEL,
    compression=CompressionConfig("none", "none"),
    data=DataConfig(sequence_length=32),
    data_parallel=DataParallelConfig(gradients="none"),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3),
    global_batch=8,
    steps=20,
    compute_dtype="float32",
)
TACO = dataclasses.replace(CONFIG, compression=CompressionConfig("taco", "taco"), mesh=MeshConfig(dp=2, tp=4))


def on(dp=1, tp=1, config=CONFIG, **changes):
    return dataclasses.replace(config, mesh=MeshConfig(dp=dp, tp=tp), **changes)


# Compiled steps that several tests take.
SMALL = dataclasses.replace(programs.CONFIG, workdir="unused")
CHAINS = dataclasses.replace(TACO, chains=2, remat="full", compute_dtype="bfloat16")
PARALLEL = dataclasses.replace(TACO, sequence_parallel=True, remat="dots", accumulation=2)
SLOW = pytest.mark.slow

PROGRAMS = {}


def program(config):
    """Built once: a program keeps no state."""
    key = repr(config)
    if key not in PROGRAMS:
        PROGRAMS[key] = build(config, make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp))
    return PROGRAMS[key]


def batch(config, step=0):
    shape = (config.global_batch, config.data.sequence_length + 1)
    return np.random.default_rng(step).integers(0, config.model.vocab_size // 4, shape, np.int32)


def train(config, steps, corrupt=None):
    """(losses, final state, program); `corrupt(state)` changes the state before the first step."""
    p = program(config)
    state, losses = p.init(jax.random.key(config.seed)), []
    state = state if corrupt is None else corrupt(state)
    for i in range(steps):
        state, metrics = p.step(state, {"tokens": jax.device_put(batch(config, i), p.batch_sharding)})
        losses.append(float(metrics["loss"]))
    return losses, state, p


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def reference():
    return train(CONFIG, 20)[0]


@pytest.mark.parametrize(
    "changes",
    [
        dict(dp=2, tp=2, sequence_parallel=True, chains=2, accumulation=2, remat="dots"),
        pytest.param(dict(dp=2, tp=4, accumulation=2, remat="full"), marks=SLOW),
        pytest.param(dict(dp=2, tp=2, sequence_parallel=True, chains=2, remat="dots"), marks=SLOW),
        pytest.param(dict(tp=2), marks=SLOW),
        pytest.param(dict(tp=4), marks=SLOW),
        pytest.param(dict(dp=2, tp=4), marks=SLOW),
        pytest.param(dict(tp=8, sequence_parallel=True), marks=SLOW),
        pytest.param(dict(dp=2, tp=2, sequence_parallel=True, accumulation=2, remat="dots"), marks=SLOW),
        pytest.param(dict(dp=2, tp=2, chains=2), marks=SLOW),
        pytest.param(dict(tp=4, chains=2, accumulation=2, remat="full"), marks=SLOW),
    ],
    ids=str,
)
def test_exact_curve_is_the_same_on_every_mesh(changes, reference):
    np.testing.assert_allclose(train(on(**changes), 20)[0], reference, rtol=1e-5)
    assert reference[-1] < reference[0] - 1


@SLOW
@pytest.mark.parametrize("tp", [2, 4])
def test_exact_curve_with_a_padded_vocabulary(tp):
    model = dataclasses.replace(MODEL, vocab_size=50_257, d_model=32)
    config = dataclasses.replace(CONFIG, model=model)
    np.testing.assert_allclose(train(on(tp=tp, config=config), 20)[0], train(config, 20)[0], rtol=1e-5)


@pytest.mark.slow
def test_repeats_bit_for_bit_and_moves_every_leaf():
    before = leaves(program(SMALL).init(jax.random.key(0)).params)
    runs = [train(SMALL, 3) for _ in range(2)]
    assert runs[0][0] == runs[1][0]
    for one, two in zip(leaves(runs[0][1]), leaves(runs[1][1]), strict=True):
        np.testing.assert_array_equal(one, two)
    for old, new in zip(before, leaves(runs[0][1].params), strict=True):
        # Padding rows of the vocabulary stay zero; everything else moves.
        assert (old != new).any()


@pytest.mark.slow
def test_replicas_are_bit_identical():
    _, state, _ = train(PARALLEL, 3)
    assert compare_replicas((state.params, state.opt_state, state.scales)) > 100


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TACO, marks=SLOW, id="plain"),
        pytest.param(CHAINS, marks=SLOW, id="chains"),
        pytest.param(PARALLEL, id="sequence_parallel"),
        *(
            pytest.param(dataclasses.replace(TACO, **changes), marks=SLOW, id=str(number))
            for number, changes in enumerate([
                dict(remat="full", compute_dtype="bfloat16"),
                dict(sequence_parallel=True, remat="full"),
                dict(sequence_parallel=True, remat="dots", accumulation=2,
                     compression=CompressionConfig("int4h", "mxfp8")),
                dict(mesh=MeshConfig(dp=4, tp=2), remat="dots", compression=CompressionConfig("e4m3", "int6h")),
                dict(chains=2, remat="full"),
                dict(chains=2, sequence_parallel=True, accumulation=2, remat="dots"),
            ])
        ),
    ],
)  # fmt: skip
def test_the_compiled_step_sends_what_the_table_lists(config):
    """Every activation-sized collective is uint8 with exactly wire_bytes, none is repeated, none gathers over dp."""
    p = program(config)
    listed = [row for row in p.table.rows() if row.kind == "activation"]
    assert all(row.codec in CODECS and row.codec != "none" for row in listed)
    sent = collectives(p.step)
    u8 = sorted(c for c in sent if c[1] == "uint8")
    # A loop's body counts once, but the chains of a layer are in it one after the other. The last sum of the last layer
    # is sent behind it.
    chains = p.parallel.chains
    handed_on = lambda row: (
        (row.site, row.direction) == ("layers/mlp/down", "forward") and not p.parallel.sequence_parallel
    )
    copies = lambda row: chains + (chains > 1 and handed_on(row)) if row.site.startswith("layers/") else 1
    assert u8 == sorted(h for row in listed for h in row.hlo * copies(row))
    # What is not uint8 is listed as exact or is a scalar of the optimiser; none of it is as large as a message.
    others = [c for c in sent if c[1] != "uint8"]
    exact = [h for row in p.table.rows() if row.kind == "other" for h in row.hlo]
    gathers = sorted(c for c in others if c[0] != "all-reduce")
    assert gathers == sorted(h for h in exact if h[0] != "all-reduce")
    listed_sums = sum(elements for opcode, _, elements in exact if opcode == "all-reduce")
    norms = len(jax.tree.leaves(p.state_shapes.params)) + 1
    found_sums = sum(elements for opcode, _, elements in others if opcode == "all-reduce")
    assert listed_sums <= found_sums <= listed_sums + 2 * norms


def test_traffic_ratio_of_taco():
    # Messages whose quarters fill whole 1,024-byte tiles: 4,096 tokens x 128 over 4 ranks.
    model = dataclasses.replace(MODEL, d_model=128)
    config = on(2, 4, TACO, model=model, data=DataConfig(sequence_length=64), global_batch=128)
    sent, bf16 = program(config).table.total()
    assert round(bf16 / sent, 3) == 1.984


def test_compressed_curve_follows_the_exact_one(reference):
    losses = train(CHAINS, 20)[0]
    np.testing.assert_allclose(losses, reference, rtol=0.02)


def test_a_non_finite_step_changes_nothing_but_the_position():
    def break_norm(state):
        params = dict(state.params, final_norm=jax.tree.map(lambda a: a * np.inf, state.params["final_norm"]))
        return dataclasses.replace(state, params=params)

    p = program(SMALL)
    before = leaves(break_norm(p.init(jax.random.key(0))))
    _, state, _ = train(SMALL, 2, corrupt=break_norm)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 2, 2)
    counters = dataclasses.replace(state, step=0, skipped=0, skipped_in_a_row=0)
    same = dataclasses.replace(break_norm(p.init(jax.random.key(0))), step=0, skipped=0, skipped_in_a_row=0)
    for old, new in zip(leaves(same), leaves(counters), strict=True):
        np.testing.assert_array_equal(old, new)
    assert before


def test_counter_of_steps_in_a_row_starts_again():
    state = dataclasses.replace(program(SMALL).init(jax.random.key(0)), skipped_in_a_row=np.int32(3))
    _, state, _ = train(SMALL, 1, corrupt=lambda fresh: dataclasses.replace(fresh, skipped_in_a_row=jax.device_put(
        np.int32(3), fresh.skipped_in_a_row.sharding)))  # fmt: skip
    assert int(state.skipped_in_a_row) == 0 and int(state.skipped) == 0


def test_sites_calibrate_in_their_own_directions():
    _, state, p = train(SMALL, 3)
    sequence_parallel = train(PARALLEL, 1)[1]
    used = {site: (np.asarray(s.exponents).reshape(-1, 2) != UNCALIBRATED).all(0) for site, s in state.scales.items()}
    forward_only, backward_only = [True, False], [False, True]
    expected = {"embed": forward_only, "layers/attn/out": forward_only, "layers/mlp/down": forward_only,
                "layers/attn/qkv": backward_only, "layers/mlp/up": backward_only, "head": backward_only}  # fmt: skip
    assert {site: list(directions) for site, directions in used.items()} == expected
    assert all((np.asarray(s.exponents) != UNCALIBRATED).all() for s in sequence_parallel.scales.values())


def test_the_norm_of_the_gradients_is_that_of_adams_mean():
    """Which is (1 - beta1) times the gradients after the first step, where nothing is clipped."""
    optimizer = dataclasses.replace(CONFIG.optimizer, clip_norm=None)
    p = program(on(dp=2, tp=2, optimizer=optimizer))
    state, metrics = p.step(p.init(jax.random.key(0)), {"tokens": jax.device_put(batch(p.config), p.batch_sharding)})
    mean = next(
        part.mu for part in jax.tree.leaves(state.opt_state, is_leaf=lambda n: hasattr(n, "mu")) if hasattr(part, "mu")
    )
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves(mean))) / (1 - optimizer.beta1)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_site_scales_are_used_after_the_steps_that_set_them():
    p = program(dataclasses.replace(TACO, mesh=MeshConfig(tp=2)))
    state, tokens = p.init(jax.random.key(0)), jax.device_put(batch(p.config), p.batch_sharding)
    last = p.config.compression.calibration_steps - 1

    def loss(step, exponent):
        scales = {site: s._replace(exponents=np.full(s.exponents.shape, exponent, np.int32))
                  for site, s in state.scales.items()}  # fmt: skip
        return float(p.eval_step(dataclasses.replace(state, step=np.int32(step), scales=scales), {"tokens": tokens})[0])

    before = loss(last, -8)
    assert loss(last, 40) == before
    assert loss(last + 1, -8) == pytest.approx(before, rel=1e-2)
    # Scales that are far too large leave little of the messages.
    assert abs(loss(last + 1, 40) / before - 1) > 1e-4


@SLOW
def test_statistics_of_the_sites():
    config = dataclasses.replace(TACO, compression=CompressionConfig("taco", "int8h"))
    _, state, p = train(config, 3)
    _, metrics = p.step_with_stats(state, {"tokens": jax.device_put(batch(config, 3), p.batch_sharding)})
    sites = summarise_stats(metrics["stats"])
    assert set(sites) == {
        "embed/forward", "layers/attn/out/forward", "layers/mlp/down/forward",
        "layers/attn/qkv/backward", "layers/mlp/up/backward", "head/backward",
    }  # fmt: skip
    for name, values in sites.items():
        low, high = (29, 36) if name.endswith("forward") else (39, 50)
        assert low < values["snr_db"] < high, name
        assert values["clipped"] == 0 and values["flushed"] < 0.15


def test_the_plan_reaches_the_step():
    compression = CompressionConfig("taco", "taco", plan={"layers/mlp/*": "int4h:int8h", "head": "none"})
    config = dataclasses.replace(TACO, compression=compression)
    rows = {(row.site, row.direction): row.codec for row in program(config).table.rows() if row.kind == "activation"}
    assert rows["layers/mlp/down", "forward"] == "int4h"
    assert rows["layers/mlp/up", "backward"] == "int8h"
    assert rows["layers/attn/out", "forward"] == "taco"
    assert rows["head", "backward"] == "none"
    with pytest.raises(ConfigError, match=r"'layers/mlq/\*' matches no site: did you mean 'layers/mlp/up'"):
        resolve_plan(dataclasses.replace(config, compression=CompressionConfig(plan={"layers/mlq/*": "taco"})))


def test_more_devices_than_there_are():
    with pytest.raises(ValueError, match="needs 16 devices, there are 8 .*--devices cpu:16"):
        make_mesh(dp=2, tp=8)


@SLOW
def test_validation_needs_no_more_memory_than_a_microbatch():
    def memory(accumulation):
        p = program(on(dp=2, config=CONFIG, accumulation=accumulation, global_batch=32, remat="full"))
        compiled = p.eval_step.lower(p.state_shapes, p.batch_shapes).compile()
        state = p.init(jax.random.key(0))
        nll, count = p.eval_step(state, {"tokens": jax.device_put(batch(p.config), p.batch_sharding)})
        return compiled.memory_analysis().temp_size_in_bytes, float(nll), float(count)

    (whole, nll, count), (parts, nll_of_parts, count_of_parts) = memory(1), memory(8)
    assert nll_of_parts == pytest.approx(nll, rel=1e-6) and count_of_parts == count == 32 * 32
    assert parts < whole / 2
