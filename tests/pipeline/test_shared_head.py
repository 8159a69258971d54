"""Stages share the loss out: the gradients of one device, each stage a part of the head's work, and what is sent."""

import dataclasses

import pytest
from hlo import collectives
from model_helpers import assert_gradients_close
from pipeline_programs import COMPRESSED, EXACT, gradients, on

from taco_jax.config import schedule as schedules
from taco_jax.config.schedule import Schedule


@pytest.fixture
def shared(monkeypatch):
    """`gradients` with sharing from a vocabulary on that small models have."""

    def run(config, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(schedules, "SHARED_VOCABULARY", 64)
            # Another key than that of the program without sharing, which tests have in common.
            return gradients(dataclasses.replace(config, seed=1), *arguments)

    return run


@pytest.mark.parametrize("schedule, sizes", [
    ("gpipe", dict(pp=4, tp=2, sequence_parallel=True)),
    pytest.param("circular", dict(dp=2, pp=2, tp=2), marks=pytest.mark.slow),
])  # fmt: skip
def test_gradients_equal_those_of_one_device(shared, schedule, sizes):
    config = dataclasses.replace(EXACT, model=dataclasses.replace(EXACT.model, tied_head=False))
    got, want = shared(on(config, schedule=schedule, **sizes)), gradients(on(config))
    assert got.loss == pytest.approx(want.loss, rel=1e-6)
    assert_gradients_close(got.grads, want.grads, exact=True)
    rows = [row for row in got.table.rows() if row.site == "pp/head"]
    stages = sizes["pp"]
    cut = sizes.get("dp", 1) * (sizes["tp"] if sizes.get("sequence_parallel") else 1)
    elements = config.global_batch * config.data.sequence_length * config.model.d_model // cut
    assert [(r.direction, r.op, r.elements, r.calls) for r in rows] == [
        (direction, "all_to_all", elements, 1) for direction in ("forward", "backward")
    ]
    assert rows[0].bytes == 4 * elements * (stages - 1) / stages
    assert [c for c in collectives(got.compiled) if c[0] == "all-to-all"] == 2 * [("all-to-all", "float32", elements)]
    (softmax,) = (row for row in got.table.rows() if row.site == "head/softmax")
    tokens = config.global_batch * config.data.sequence_length // sizes.get("dp", 1)
    assert softmax.elements * softmax.calls == sizes["tp"] * 3 * tokens // stages


def test_parts_measure_as_many_values_as_the_last_stage_alone(shared):
    config = on(COMPRESSED, pp=2, tp=2)
    got, want = shared(config, True), gradients(config, True)
    assert [len([r for r in result.table.rows() if r.site == "pp/head"]) for result in (got, want)] == [2, 0]
    assert got.measures["head"][..., -1].tolist() == want.measures["head"][..., -1].tolist()
    assert got.measures["head"][1, 0] == pytest.approx(want.measures["head"][1, 0], rel=1e-2)


def test_where_stages_share_it():
    shares = lambda *of, kind="gpipe", stages=4: Schedule(kind, stages, 8).shares_head(*of)
    limit = schedules.SHARED_VOCABULARY
    assert shares(8, limit, 1) and shares(8, 2 * limit, 2)
    assert not shares(8, limit - 1, 1)  # a message costs more
    assert not shares(8, limit, 2)  # each rank has half of the vocabulary
    assert not shares(9, limit, 1)  # sequences that stages cannot share
    assert not shares(8, limit, 1, kind="1f1b")  # the last stage's other work is less already
