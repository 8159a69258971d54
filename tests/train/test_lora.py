"""Adapters: gradients against one device and against dense matrices, what is sent and held, and whole runs."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from model_helpers import QWEN2, assert_gradients_close, by_path
from pipeline_programs import EXACT, batch, on, program

from taco_jax.collectives import comm_log
from taco_jax.config import LoraConfig
from taco_jax.config import pipeline_schedule as schedule_of
from taco_jax.pipeline import layout

RANK = 4
MODEL = dataclasses.replace(QWEN2, n_layers=4)
CONFIG = dataclasses.replace(EXACT, model=MODEL, lora=LoraConfig(RANK, alpha=12.0))
SOME = dataclasses.replace(CONFIG, lora=LoraConfig(RANK, targets=("attn/v", "o_proj", "mlp/down")))


def drawn(shapes, std=0.05):
    """Values by the names of the leaves, those of scales near 1; padding of the vocabulary in zeros."""

    def leaf(path, a):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = [MODEL.vocab_size if path[0].key in ("embed", "head") and n >= MODEL.vocab_size else n for n in a.shape]
        value = np.zeros(a.shape, np.float32)
        value[tuple(map(slice, size))] = std * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size)
        return jax.device_put(value + name.endswith("scale"), a.sharding)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def state(p, base=None):
    """A state whose base and adapters all matter."""
    stored = p.stored.shapes
    zeros = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), stored)
    made = p.stored.unpack(dataclasses.replace(zeros, params=drawn(stored.params), copy=None))
    return made if p.base is None else dataclasses.replace(made, base=p.base.unpack(drawn(p.base.shapes)))


def gradients(config, start=None):
    """(loss, gradients by path, site table, the compiled program) of a batch."""
    p = program(config)
    function = jax.jit(lambda state, tokens: p._gradients(state, tokens, False))
    with comm_log.record() as table:
        compiled = function.lower(p.state_shapes, p.batch_shapes["tokens"]).compile()
    loss, grads, _ = compiled(state(p) if start is None else start(p), batch(p)["tokens"])
    chunks = layout.chunks_of(schedule_of(config))
    return float(loss), by_path(jax.tree.map(layout.join(chunks), grads, layout.in_layers(grads))), table, compiled


@pytest.fixture(scope="module")
def alone():
    """Loss and gradients of a configuration on one device, made once."""
    made = {}

    def of(config):
        key = repr(config)
        if key not in made:
            made[key] = gradients(on(config))[:2]
        return made[key]

    return of


def dense_gradients(config):
    """Gradients of A and B by the chain rule from those of the matrices that have taken the adapters in."""
    p = program(on(config))
    start = state(p)
    adapters, scale = by_path(start.params), config.lora.scale
    merged = by_path(start.base)
    targets = {name.rpartition("/")[0] for name in adapters}
    for name in targets:
        a, b = adapters[f"{name}/lora_a"].astype(np.float64), adapters[f"{name}/lora_b"].astype(np.float64)
        merged[f"{name}/kernel"] = (merged[f"{name}/kernel"] + scale * a @ b).astype(np.float32)

    def start_merged(full):
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), full.state_shapes)
        place = lambda path, a: jax.device_put(merged["/".join(k.key for k in path)], a.sharding)
        return dataclasses.replace(zeros, params=jax.tree_util.tree_map_with_path(place, full.state_shapes.params))

    loss, of_matrices, *_ = gradients(on(dataclasses.replace(config, lora=LoraConfig())), start_merged)
    want = {}
    for name in targets:
        d = of_matrices[f"{name}/kernel"].astype(np.float64)
        want[f"{name}/lora_a"] = scale * d @ adapters[f"{name}/lora_b"].swapaxes(1, 2)
        want[f"{name}/lora_b"] = scale * adapters[f"{name}/lora_a"].swapaxes(1, 2) @ d
    return loss, want


@pytest.mark.parametrize("config", [CONFIG, pytest.param(SOME, marks=pytest.mark.slow)])
def test_gradients_equal_those_of_dense_matrices(config, alone):
    (loss, grads), (want_loss, want) = alone(config), dense_gradients(config)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_gradients_close(grads, want, exact=True)


SLOW = pytest.mark.slow
MESHES = [
    # tp 4 of 2 kv heads: those are whole on every rank.
    pytest.param(CONFIG, dict(dp=2, tp=4), id="replicated kv heads"),
    pytest.param(CONFIG, dict(tp=2, sequence_parallel=True, remat="full", accumulation=2), id="sequence", marks=SLOW),
    pytest.param(CONFIG, dict(tp=2, chains=2, remat="none"), id="chains", marks=SLOW),
    pytest.param(SOME, dict(tp=2, chains=2, remat="dots"), id="chains of some"),
    pytest.param(CONFIG, dict(pp=2, tp=2, remat="dots", sequence_parallel=True), id="gpipe", marks=SLOW),
    pytest.param(CONFIG, dict(dp=2, pp=2, tp=2, schedule="circular"), id="circular", marks=SLOW),
    pytest.param(CONFIG, dict(pp=2, tp=2, schedule="1f1b"), id="1f1b"),
]  # fmt: skip


@pytest.mark.parametrize("config, mesh", MESHES)
def test_gradients_equal_those_of_one_device(config, mesh, alone):
    loss, grads, *_ = gradients(on(config, **mesh))
    want_loss, want = alone(config)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_gradients_close(grads, want, exact=True)
