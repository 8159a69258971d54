"""Adapters: gradients against one device and against dense matrices, what is sent and held, and whole runs."""

import contextlib
import dataclasses
import json
import re
import types
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from model_helpers import GPT2, QWEN2, assert_gradients_close, by_path, compare_replicas
from pipeline_programs import EXACT, batch, on, program

from taco_jax.config import (
    CompressionConfig,
    ConfigError,
    DataParallelConfig,
    LoraConfig,
    OptimizerConfig,
    cli,
)
from taco_jax.config import pipeline_schedule as schedule_of
from taco_jax.config.checks import check
from taco_jax.config.lora import MATRICES
from taco_jax.inference.run_folder import adapters_of
from taco_jax.models import lora
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.pipeline import layout
from taco_jax.train import base, dry_run
from taco_jax.train.workdir import open_workdir

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
    """(loss, gradients by path, the compiled program) of a batch."""
    p = program(config)
    function = jax.jit(lambda state, tokens: p._gradients(state, tokens, False))
    compiled = function.lower(p.state_shapes, p.batch_shapes["tokens"]).compile()
    loss, grads, _ = compiled(state(p) if start is None else start(p), batch(p)["tokens"])
    chunks = layout.chunks_of(schedule_of(config))
    return float(loss), by_path(jax.tree.map(layout.join(chunks), grads, layout.in_layers(grads))), compiled


def _once(function):
    """`function` of a configuration, whose results are kept while the module's tests run."""
    made = {}

    def of(config):
        if repr(config) not in made:
            made[repr(config)] = function(config)
        return made[repr(config)]

    return of


@pytest.fixture(scope="module")
def alone():
    return _once(lambda config: gradients(on(config)))


@pytest.fixture(scope="module")
def dense():
    return _once(dense_gradients)


def of_the_base(tp: int) -> set[tuple[int, ...]]:
    """Shapes of the gradients of the model's kernels on a device: out; down; gate and up; q, k and v; the head."""
    d, f, query, kv = MODEL.d_model, MODEL.d_mlp, 64, 16
    columns = 2 * f, query + 2 * kv, pad_vocab(MODEL.vocab_size, tp)
    return {(query // tp, d), (f // tp, d), *((d, n // tp) for n in columns)}


def products(compiled) -> set[tuple[int, ...]]:
    """Shapes of the results of all matrix products in a compiled program."""
    found = re.findall(r" = \w+\[([\d,]*)\]\S* dot\(", compiled.as_text())
    return {tuple(map(int, dims.split(","))) for dims in found}


def dense_gradients(config):
    """(loss, gradients of A and B) on one device, by the chain rule from those of merged matrices."""
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

    full = on(dataclasses.replace(config, lora=LoraConfig()))
    loss, of_matrices, compiled = gradients(full, start_merged)
    assert of_the_base(1) <= products(compiled)
    want = {}
    for name in targets:
        d = of_matrices[f"{name}/kernel"].astype(np.float64)
        want[f"{name}/lora_a"] = scale * d @ adapters[f"{name}/lora_b"].swapaxes(1, 2)
        want[f"{name}/lora_b"] = scale * adapters[f"{name}/lora_a"].swapaxes(1, 2) @ d
    return loss, want


# A microbatch has other numbers of tokens than kernels have rows, else their products look alike.
SLOW = pytest.mark.slow
ALONE = dict(tp=1)
MESHES = [
    pytest.param(CONFIG, ALONE, id="one device", marks=SLOW),
    pytest.param(SOME, ALONE, id="one device, some", marks=SLOW),
    # tp 4 of 2 kv heads: those are whole on every rank.
    pytest.param(CONFIG, dict(dp=2, tp=4, chains=2, remat="dots"), id="chains, replicated kv heads"),
    pytest.param(CONFIG, dict(pp=2, tp=2, schedule="1f1b"), id="1f1b", marks=SLOW),
    pytest.param(CONFIG, dict(tp=2, sequence_parallel=True, remat="full", accumulation=2), id="sequence", marks=SLOW),
    pytest.param(CONFIG, dict(dp=2, tp=2, chains=2), id="chains", marks=SLOW),
    pytest.param(SOME, dict(tp=2, chains=2, remat="full"), id="chains of some", marks=SLOW),
    pytest.param(SOME, dict(pp=2, tp=2, schedule="1f1b"), id="1f1b of some", marks=SLOW),
    pytest.param(CONFIG, dict(pp=2, tp=2, remat="dots", sequence_parallel=True), id="gpipe", marks=SLOW),
    pytest.param(CONFIG, dict(dp=2, pp=2, tp=2, schedule="circular", microbatches=2), id="circular", marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize("config, mesh", MESHES)
def test_gradients_equal_those_of_dense_matrices(config, mesh, alone, dense):
    """On one device too. And gradients of the base are not computed: not of matrices without an adapter either,
    nor of the head, whose gradient is taken in the forward pass."""
    loss, grads, compiled = alone(config) if mesh == ALONE else gradients(on(config, **mesh))
    want_loss, want = dense(config)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    assert_gradients_close(grads, want, exact=True)
    assert mesh["tp"] > 2 or not of_the_base(mesh["tp"]) & products(compiled)
    if mesh != ALONE and config is SOME:
        assert_gradients_close(grads, alone(config)[1], exact=True)


def test_only_adapters_have_gradients_moments_and_messages():
    """dp 2 x tp 2: what is held, what is summed over dp, and which messages adapters add over tp."""
    full = dataclasses.replace(CONFIG, lora=LoraConfig())
    p, without = program(on(CONFIG, dp=2, tp=2)), program(on(full, dp=2, tp=2))
    d, f, kv, query = MODEL.d_model, MODEL.d_mlp, 16, 64
    # A and B of q, k, v, gate, up; of out, down. On a device whole, or half of it.
    local = RANK * (5 * d + (query + 2 * kv + 2 * f) // 2 + (query + f) // 2 + 2 * d) * MODEL.n_layers
    assert p.data_parallel.gradient_bytes == dry_run.local_bytes(p.state_shapes.params) == 4 * local
    assert dry_run.local_bytes(p.state_shapes.opt_state) == 2 * 4 * local + 2 * 4  # and two counts
    assert dry_run.local_bytes(p.state_shapes.base) == dry_run.local_bytes(without.state_shapes.params)

    rows = {(row.site, row.direction): row for row in p.table.rows()}
    before = {(row.site, row.direction): row for row in without.table.rows()}
    assert rows["dp/grads", "backward"].elements == local < before["dp/grads", "backward"].elements / 4
    # The layers' messages are those of before; each whole A or B has its gradient summed once.
    more = {site: row.elements for (site, _), row in rows.items() if (site, _) not in before}
    a, b = (f"layers/{{}}/lora_{x}/grad" for x in "ab")
    columns, row_wise = ("attn/q", "attn/k", "attn/v", "mlp/gate", "mlp/up"), ("attn/out", "mlp/down")
    want = {a.format(name): RANK * d * MODEL.n_layers for name in columns}
    assert more == want | {b.format(name): RANK * d * MODEL.n_layers for name in row_wise}
    same = before.keys() - {("dp/grads", "backward")}
    assert all((rows[key].elements, rows[key].bytes) == (before[key].elements, before[key].bytes) for key in same)


def test_no_sum_of_a_frozen_parameter_s_gradient_is_listed():
    """Of what every rank holds whole: replicated kv heads, their norms, learned positions, all norms and biases."""
    model = dataclasses.replace(MODEL, qk_norm=True, positions="learned", out_bias=True, mlp_bias=True)
    listed = []
    for config in (CONFIG, dataclasses.replace(CONFIG, lora=LoraConfig())):
        p = program(on(dataclasses.replace(config, model=model), tp=4, sequence_parallel=True))
        listed.append({row.site.removesuffix("/grad") for row in p.table.rows() if row.site.endswith("/grad")})
    of_adapters, without = listed
    assert len(of_adapters) == len(MATRICES) + 2  # of k and v both matrices
    assert {name.rpartition("/")[2] for name in of_adapters} == {"lora_a", "lora_b"}
    assert {"embed/positions", "final_norm/scale", "layers/attn/k/kernel", "layers/attn/q_norm/scale"} <= without


def test_a_step_changes_adapters_alone():
    """With ZeRO-1, a compressed copy and a codec on every axis; all ranks hold the same after it."""
    changes = dict(compression=CompressionConfig("int8h", "int8h", min_bytes=0), optimizer=OptimizerConfig(1e-2))
    zero1 = DataParallelConfig(zero1=True, gradients="int8h", parameters="int8h")
    p = program(on(CONFIG, dp=2, tp=2, data_parallel=zero1, steps=3, **changes))
    start, tokens = p.init(jax.random.key(0)), batch(p)
    base, first = by_path(start.base), by_path(start.copy)
    assert all(not leaf.any() for name, leaf in first.items() if name.endswith("lora_b"))
    losses = []
    for _ in range(3):
        start, metrics = p.step(start, tokens)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] - 1e-3
    for name, leaf in by_path(start.base).items():
        np.testing.assert_array_equal(leaf, base[name], err_msg=name)
    assert all((leaf != first[name]).any() for name, leaf in by_path(start.copy).items())
    assert compare_replicas((start.base, start.copy))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--lora.rank", "0"], r"lora.rank=0: must be at least 1, or None to train the model's own weights"),
        (["--lora.rank", "4", "--lora.targets", "q_prj"], r"lora.targets='q_prj': did you mean 'q_proj'\? .one of .*"),
        (["--lora.rank", "4", "--lora.alpha", "0"], r"lora.alpha=0.0: must be above 0 and finite"),
        (["--lora.alpha", "4"], r"lora.alpha=4.0: is used with lora.rank alone; set that too, .*"),
        (["--lora.targets", "attn/q"], r"lora.targets=\('attn/q',\): is used with lora.rank alone; .*"),
        (["--lora.rank", "17"], r"lora.rank=17: is above that of attn/k, a matrix of 32 x 16; use at most 16, or .*"),
        (["--lora.rank", "4", "--model.no-gated-mlp", "--lora.targets", "gate_proj"],
         r"lora.targets='mlp/gate': the model has no such matrix; try attn/q, .*"),
        (["--lora.rank", "4", "--compression.forward", "int8h", "--compression.with-product"],
         r"compression.with_product=True: is never used with lora.rank=4 .*"),
        (["--lora.rank", "4", "--init-from", "x", "--init-optimizer"], r"init_optimizer=True: adapters .*rank=4.*"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(flags, message):
    full = dataclasses.replace(CONFIG, lora=LoraConfig())
    with pytest.raises(ConfigError, match=f"^{message}$") as error:
        check(cli.parse_flags(full, flags, prog="", description=""))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "lora, message",
    [
        (5, "lora=5: must be an object of keys"),
        ({"rank": 4, "size": 1}, "lora.size: no such key; .*"),
        ({"rank": "4"}, "lora.rank='4': must be of type int or None, is str; .*"),
        ({"rank": 4, "targets": "q_proj"}, "lora.targets='q_proj': must be of type tuple, is str"),
        ({"rank": 4, "targets": [5]}, r"lora.targets=5: must be one of .*"),
        ({"rank": 4, "alpha": float("nan")}, "lora.alpha=nan: must be above 0 and finite"),
    ],
)
def test_a_damaged_config_of_a_run_is_one_line(lora, message):
    """For what reads a run, and for a run that starts from one."""
    settings = {"model": dataclasses.asdict(MODEL), "lora": lora}
    with pytest.raises(ConfigError, match=f"^x/config.json: {message}$"):
        adapters_of(settings, MODEL, Path("x/config.json"))


@pytest.mark.parametrize("first, begun", [(True, False), (True, True), (False, False)])
def test_another_base_is_moved_once_all_have_seen_it(first, begun, monkeypatch, tmp_path):
    """Of several processes the first one moves it: not before the others have looked, which would go on without it.

    What a killed run has begun to write goes, else each such start would leave gigabytes.
    """
    from jax.experimental import multihost_utils

    done = []
    monkeypatch.setattr(multihost_utils, "sync_global_devices", lambda name: done.append("wait"))
    monkeypatch.setattr(base, "set_aside", lambda folder: done.append("move"))
    monkeypatch.setattr(base, "Checkpoints", lambda *args: contextlib.nullcontext(types.SimpleNamespace(
        steps=list, save=lambda *args, **more: done.append("save"))))  # fmt: skip
    (tmp_path / "base" / ("0.orbax-checkpoint-tmp" if begun else "0")).mkdir(parents=True)
    monkeypatch.setattr(base, "digest_of", lambda *args: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: int(not first))
    base.Base({}, 1, None).keep({}, dataclasses.replace(CONFIG, workdir=str(tmp_path)))
    assert done == ["wait", *["move"] * (first and not begun), "wait", "save"]
    assert (tmp_path / "base").exists() != begun


def test_a_workdir_takes_the_same_adapters_in_other_words(tmp_path):
    """The default spelled out, and Hugging Face's names."""
    of = lambda **lora: dataclasses.replace(CONFIG, lora=LoraConfig(4, **lora), workdir=str(tmp_path / "run"))
    open_workdir(of(targets=("q_proj", "v_proj")))
    assert open_workdir(of(alpha=8.0, targets=("attn/v", "attn/q"))) == []
    for other in (of(alpha=9.0, targets=("q_proj", "v_proj")), of(targets=("q_proj",)), of()):
        with pytest.raises(ConfigError, match="holds another model .lora."):
            open_workdir(other)
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora": 5}))
    with pytest.raises(ConfigError, match="config.json: lora=5: must be an object of keys"):
        open_workdir(of())


def test_names_of_targets():
    named = lambda *targets: LoraConfig(4, targets=targets).named
    assert named("q_proj", "down_proj") == named("mlp/down", "attn/q") == ("attn/q", "mlp/down")
    assert named("c_attn", "q_proj") == ("attn/q", "attn/k", "attn/v")
    assert lora.Adapters.of(LoraConfig(4), GPT2).targets == MATRICES[:4] + MATRICES[5:]
    assert lora.Adapters.of(LoraConfig(4), QWEN2) == lora.Adapters(4, 2.0, MATRICES)
