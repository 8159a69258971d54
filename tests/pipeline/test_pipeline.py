"""Pipelines: every schedule computes what one device does, sends what the table lists, and counts only what is work."""

import dataclasses

import jax
import numpy as np
import pytest
from hlo import collectives
from model_helpers import CONFIGS, assert_gradients_close
from pipeline_programs import COMPRESSED, EXACT, batch, gradients, on, program, state

from taco_jax.codec import CODECS
from taco_jax.config import pipeline_schedule as schedule_of
from taco_jax.train.site_stats import summarise_stats

SCHEDULES = ("gpipe", "circular", "1f1b")
MODELS = {name: dataclasses.replace(EXACT, model=dataclasses.replace(c, n_layers=8)) for name, c in CONFIGS.items()}
UNTIED = MODELS["qwen2"]


# Sequence parallelism is left to the trainer, which takes it here.
CIRCULAR = dict(pp=2, tp=2, schedule="circular", accumulation=2, sequence_parallel=None)


def assert_as_on_one_device(config, **mesh):
    got, want = gradients(on(config, **mesh)), gradients(on(config))
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert_gradients_close(got.grads, want.grads, exact=True)


@pytest.mark.parametrize(
    "config, mesh",
    [
        pytest.param(EXACT, dict(dp=2, pp=2, tp=2, schedule="gpipe", remat="full", chains=2), id="gpipe"),
        pytest.param(EXACT, CIRCULAR, marks=pytest.mark.slow, id="circular"),
        pytest.param(UNTIED, dict(pp=4, tp=2, schedule="1f1b", microbatches=8, sequence_parallel=True), id="1f1b"),
    ],
)
def test_gradients_equal_those_of_one_device(config, mesh):
    assert_as_on_one_device(config, **mesh)


def test_ranks_of_a_stage_send_a_part_each():
    """Sequence parallelism is on by itself between stages: 1 / tp of what each rank would send.

    The trainer's tests compare the losses of such a run with those of one device, a slow test the gradients.
    """
    config = on(EXACT, **CIRCULAR)
    values = config.global_batch * config.data.sequence_length * config.model.d_model // config.accumulation
    sent = [row.elements for row in program(config).table.rows() if row.site == "pp/act"]
    assert sent == 2 * [values // 4 // 2]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name, sizes, options", [
    ("gpt2", (2, 2, 2), dict(microbatches=1)),
    ("gpt2", (1, 4, 2), dict(microbatches=3, sequence_parallel=True, global_batch=12)),
    ("gpt2", (1, 8, 1), dict(microbatches=7, global_batch=14)),
    ("gpt2", (1, 2, 4), dict(microbatches=8, remat="dots", chains=2)),
    ("qwen2", (2, 2, 2), dict(microbatches=4, accumulation=2, sequence_parallel=True, remat="full")),
    ("qwen2", (1, 2, 4), dict(microbatches=2, sequence_parallel=True)),
    ("qwen2", (1, 8, 1), dict(microbatches=16)),
    ("qwen2", (2, 4, 1), dict(microbatches=4, chains=2)),
    ("qwen3", (1, 4, 2), dict(microbatches=4, remat="full")),
    ("llama", (1, 2, 4), dict(microbatches=4, chains=4, remat="full")),
])  # fmt: skip
def test_gradients_equal_those_of_one_device_on_more_meshes(schedule, name, sizes, options):
    dp, pp, tp = sizes
    layers = 16 if pp == 8 else 8
    config = dataclasses.replace(MODELS[name], global_batch=options.get("global_batch", 16))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=layers))
    assert_as_on_one_device(config, dp=dp, pp=pp, tp=tp, schedule=schedule, **options)


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(s, marks=pytest.mark.slow) for s in ("gpipe", "circular")), "1f1b"]
)
def test_compressed(schedule):
    """With 8-bit codecs: gradients, what the sites measured, and the messages."""
    config = on(COMPRESSED, pp=2, tp=2, schedule=schedule)
    got, want = gradients(config, True), gradients(on(COMPRESSED, tp=2, accumulation=4), True)
    assert got.loss == pytest.approx(want.loss, rel=1e-3)
    assert_gradients_close(got.grads, gradients(on(EXACT)).grads, exact=False)

    # Empty ticks measure nothing: as many values as without a pipeline, and the same maxima.
    for site, measures in want.measures.items():
        np.testing.assert_array_equal(got.measures[site][..., -1], measures[..., -1], err_msg=site)
        np.testing.assert_allclose(got.measures[site][..., 0], measures[..., 0], rtol=0.1, err_msg=site)
    # Every boundary of chunks passes each value once in each direction, on both ranks of tp.
    boundaries = 2 * schedule_of(config).chunks - 1
    values = config.global_batch * config.data.sequence_length * config.model.d_model
    assert list(got.measures["pp/act"][:, -1]) == 2 * [2 * boundaries * values]
    quality = summarise_stats(got.measures)
    assert 38 < quality["pp/act/forward"]["snr_db"] < 48 and 29 < quality["pp/act/backward"]["snr_db"] < 36

    # Sends are bytes, one message a tick, and everything that is sent is listed.
    rows = {(row.site, row.direction): row for row in got.table.rows()}
    ticks = {"gpipe": 4 + 1, "circular": 2 * 4 + 1, "1f1b": 4 + 2}[schedule]
    for direction, codec in (("forward", "int8_token"), ("backward", "e4m3h")):
        row, nbytes = rows["pp/act", direction], CODECS[codec].of((config.model.d_model,)).wire_bytes(values // 4)
        assert (row.codec, row.calls, row.bytes) == (codec, ticks, ticks * nbytes)
        assert row.hlo == (("collective-permute", "uint8", nbytes),)
    sent = [c for c in collectives(got.compiled) if c[1] == "uint8"]
    copies = lambda row: (
        2 if schedule == "1f1b" and row.site.startswith("layers/") and row.direction == "forward" else 1
    )
    assert sorted(sent) == sorted(h for row in rows.values() if row.codec != "none" for h in row.hlo * copies(row))
    items = {"gpipe": 2 * 5, "circular": 1 * 9, "1f1b": 2 * 4}[schedule]
    assert rows["layers/mlp/up", "backward"].calls == items
    assert rows["layers/mlp/down", "forward"].calls == items * (2 if schedule == "1f1b" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_measures_are_those_without_a_pipeline_where_stages_send_exactly(schedule):
    config = dataclasses.replace(COMPRESSED, pipeline=EXACT.pipeline)
    got = gradients(on(config, pp=4, tp=2, chunks=1, schedule=schedule, microbatches=4), True)
    want = gradients(on(config, tp=2, accumulation=4), True)
    for site, measures in want.measures.items():
        # Another order of a sum moves a rounded value now and then.
        np.testing.assert_allclose(got.measures[site][..., 0], measures[..., 0], rtol=2e-3, err_msg=site)
        np.testing.assert_array_equal(got.measures[site][..., -1], measures[..., -1], err_msg=site)
    assert "pp/act" not in got.measures


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
def test_stages_send_in_three_and_four_bits(schedule):
    """tah4 both ways: its bytes, the quality that it has by itself, and gradients that point where they should."""
    pipeline = dataclasses.replace(COMPRESSED.pipeline, forward="tah4", backward="tah4")
    config = on(dataclasses.replace(EXACT, pipeline=pipeline), pp=2, schedule=schedule)
    got, exact = gradients(config, True), gradients(on(EXACT))
    values = config.global_batch * config.data.sequence_length * config.model.d_model
    nbytes = CODECS["tah4"].wire_bytes(values // 4)
    rows = [row for row in got.table.rows() if row.site == "pp/act"]
    assert [(row.codec, row.hlo) for row in rows] == 2 * [("tah4", (("collective-permute", "uint8", nbytes),))]
    assert {c for c in collectives(got.compiled) if c[1] == "uint8"} == {("collective-permute", "uint8", nbytes)}
    quality = summarise_stats(got.measures)
    assert all(15 < quality[f"pp/act/{direction}"]["snr_db"] < 25 for direction in ("forward", "backward"))
    assert got.loss == pytest.approx(exact.loss, rel=1e-2)
    flat = lambda grads: np.concatenate([grads[path].ravel() for path in sorted(exact.grads)])
    ours, theirs = flat(got.grads), flat(exact.grads)
    assert ours @ theirs > 0.95 * np.linalg.norm(ours) * np.linalg.norm(theirs)
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(theirs), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (1, 2, 4), (1, 8, 1)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compressed_gradients_on_more_meshes(schedule, sizes):
    dp, pp, tp = sizes
    codecs = dict(forward="taco", backward="int8h") if tp == 4 else {}
    config = dataclasses.replace(COMPRESSED, pipeline=dataclasses.replace(COMPRESSED.pipeline, **codecs))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=8))
    exact = gradients(on(dataclasses.replace(EXACT, model=config.model)))
    got = gradients(on(config, dp, pp, tp, schedule, chunks=8 // pp))
    assert_gradients_close(got.grads, exact.grads, exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_only_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches(schedule):
    small = dataclasses.replace(EXACT, model=dataclasses.replace(EXACT.model, n_layers=2))

    def temporary(microbatches):
        p = program(on(small, pp=2, schedule=schedule, microbatches=microbatches, global_batch=2 * microbatches))
        step = jax.jit(lambda state, tokens: p._gradients(state, tokens, False))
        return step.lower(p.state_shapes, p.batch_shapes["tokens"]).compile().memory_analysis().temp_size_in_bytes

    growth = temporary(32) / temporary(8)
    assert growth <= 1.05 if schedule == "1f1b" else growth > 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_validation(schedule):
    def evaluate(config):
        p = program(config)
        weights = (np.random.default_rng(2).random((16, 16)) < 0.7).astype(np.float32)
        return [
            float(v) for v in p.eval_step(state(p), batch(p) | {"weights": jax.device_put(weights, p.batch_sharding)})
        ]

    got = evaluate(on(EXACT, 2, 2, 2, schedule, microbatches=2, accumulation=2))
    np.testing.assert_allclose(got, evaluate(on(EXACT)), rtol=1e-6)


@pytest.mark.slow
def test_a_step_under_every_schedule_trains():
    """The optimiser, the scales and the decay of matrices alike: three steps end where those of one device do."""

    def losses(config):
        p = program(config)
        s = state(p)
        out = []
        for _ in range(3):
            s, metrics = p.step(s, batch(p))
            out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        return np.array(out), p.stored.pack(s)

    options = dict(optimizer=dataclasses.replace(EXACT.optimizer, learning_rate=1e-2, warmup_steps=1, weight_decay=1.0))
    want, one = losses(on(EXACT, **options))
    got, circular = losses(on(EXACT, pp=2, schedule="circular", **options))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(circular.params), jax.tree.leaves(one.params), strict=True):
        np.testing.assert_allclose(np.asarray(a)[: len(b)], np.asarray(b)[: len(a)], atol=2e-4)
