"""Checkpoints: what comes back, on which mesh, and what is refused; the workdir around them."""

import dataclasses
import errno
import fcntl
import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import REPOSITORY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.config import CheckpointConfig, ConfigError, DataConfig, MeshConfig, ModelConfig, TrainConfig
from taco_jax.train import checkpoint
from taco_jax.train.checkpoint import CheckpointError, Checkpoints, SaveError
from taco_jax.train.digests import _on_device as digest_on_device
from taco_jax.train.digests import digests
from taco_jax.train.workdir import locked, open_workdir, set_aside, write_text

VOCAB = 60


class Scale(NamedTuple):
    exponents: Any
    history: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    step: Any
    params: Any
    opt_state: Any
    scales: Any


def make_state(rows=64, history=4, dtype=jnp.float32):
    params = {
        "embed": jnp.arange(rows * 8, dtype=dtype).reshape(rows, 8).at[VOCAB:].set(0),
        "layers": {"kernel": jnp.arange(128.0).reshape(2, 8, 8)},
    }
    scales = {"layers/attn/out": Scale(jnp.full((2, 2), 3, jnp.int32), jnp.ones((2, 2, history)))}
    return State(jnp.int32(3), params, optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params), scales)


def place(state, mesh):
    """The state's shapes with the shardings of `mesh`."""

    def shape(path, leaf):
        name = jax.tree_util.keystr(path)
        spec = P("tp") if "embed" in name else P(None, None, "tp") if "kernel" in name else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(shape, state)


def put(state, mesh):
    return jax.tree.map(lambda leaf, shape: jax.device_put(leaf, shape.sharding), state, place(state, mesh))


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def no_fresh_scales():
    raise AssertionError("scales were not restored")


def test_round_trip_on_another_mesh(tmp_path, make_mesh):
    state = put(make_state(), make_mesh(dp=2, tp=4))
    run = {"data": {"samples": 12, "seed": 5}, "seed": 5}
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.choose(None) is None
        checkpoints.save(3, state, run)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.choose(None) == 3
        target = place(state, make_mesh(dp=1, tp=2))
        restored, found, remarks = checkpoints.restore(3, target, VOCAB, no_fresh_scales)
    equal(state, restored)
    assert found == {"step": 3, **run} and remarks == []
    assert restored.params["embed"].sharding.mesh.shape["tp"] == 2


def test_saved_before_the_next_step_donates(tmp_path, make_mesh):
    state = put(make_state(), make_mesh(tp=2))
    expected = jax.device_get(state)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {})
        jax.jit(lambda s: jax.tree.map(lambda a: a * 0, s), donate_argnums=0)(state)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        restored, _, _ = checkpoints.restore(1, place(expected, make_mesh(tp=2)), VOCAB, no_fresh_scales)
    equal(expected, restored)


@pytest.mark.parametrize("rows", [62, 64, 72])
def test_only_padding_of_the_vocabulary_changes(tmp_path, make_mesh, rows):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, put(make_state(), make_mesh(tp=4)), {})
        target = make_state(rows)
        restored, _, _ = checkpoints.restore(3, place(target, make_mesh(tp=2)), VOCAB, no_fresh_scales)
    equal(target, restored)


def test_a_disk_that_is_full_is_one_line(tmp_path, make_mesh, capfd):
    """Files may grow to 20 kB, as on a disk with so much room; nothing but the error comes out."""
    state = put(make_state(), make_mesh())
    noise = {str(i): jnp.asarray(np.random.default_rng(i).normal(size=(64, 512))) for i in range(8)}
    large, limits = dataclasses.replace(state, params=noise), resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(SaveError) as error, Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.save(4, state, {})  # waits for the one before
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            checkpoints.save(5, large, {})
            checkpoints.save(6, state, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    message = r"checkpoint .*/c/5: cannot be written \(File too large\); with more room .* from step 4, the last .* one"
    assert re.fullmatch(message, str(error.value))
    assert capfd.readouterr().err == ""
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.steps() == [3, 4]


def test_other_shapes_are_refused(tmp_path, make_mesh):
    mesh = make_mesh(tp=2)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, put(make_state(), mesh), {})
        with pytest.raises(CheckpointError, match=re.escape("embed is float32[64, 8], the run needs float32[58, 8]")):
            checkpoints.restore(3, place(make_state(58), mesh), VOCAB, no_fresh_scales)
        with pytest.raises(CheckpointError, match="the run needs bfloat16"):
            checkpoints.restore(3, place(make_state(dtype=jnp.bfloat16), mesh), VOCAB, no_fresh_scales)
        more = make_state()
        more.params["bias"] = jnp.zeros(3)
        with pytest.raises(CheckpointError, match=r"its arrays are not this program's \(differing: params.bias\)"):
            checkpoints.restore(3, place(more, mesh), VOCAB, no_fresh_scales)


def test_scales_of_another_history_start_fresh(tmp_path, make_mesh):
    mesh = make_mesh(tp=2)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, put(make_state(), mesh), {})
        for target in (make_state(history=8), dataclasses.replace(make_state(), scales={})):
            restored, _, remarks = checkpoints.restore(3, place(target, mesh), VOCAB, lambda: "fresh")
            assert restored.scales == "fresh" and "uncalibrated" in remarks[0]
            equal(restored.params, target.params)


def test_scales_of_sites_that_are_in_both_come_back(tmp_path, make_mesh):
    mesh, state = make_mesh(tp=2), make_state()
    scale = state.scales["layers/attn/out"]
    of = lambda *sites: dataclasses.replace(state, scales=dict.fromkeys(sites, scale))
    fresh = lambda *sites: {site: jax.tree.map(jnp.zeros_like, scale) for site in sites}
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(3, put(of("layers/attn/out", "pp/act"), mesh), {})
        restored, _, remarks = checkpoints.restore(3, place(of("layers/attn/out"), mesh), VOCAB, no_fresh_scales)
        equal(restored.scales, {"layers/attn/out": scale})
        assert remarks == []
        restored, _, (remark,) = checkpoints.restore(
            3, place(of("embed", "pp/act"), mesh), VOCAB, lambda: fresh("embed", "pp/act")
        )
        equal(restored.scales, {"pp/act": scale} | fresh("embed"))
        assert remark.startswith("site scales of embed start uncalibrated: ")


def test_state_without_scales(tmp_path, make_mesh):
    state = dataclasses.replace(make_state(), scales={})
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, put(state, make_mesh()), {})
        restored, _, remarks = checkpoints.restore(1, place(state, make_mesh()), VOCAB, dict)
    equal(state, restored)
    assert remarks == []


def test_choosing_a_step(tmp_path, make_mesh):
    state = put(make_state(), make_mesh())
    with Checkpoints(tmp_path / "c", CheckpointConfig(keep=2)) as checkpoints:
        with pytest.raises(CheckpointError, match="checkpoint.resume_step=7: .*the workdir has no checkpoint"):
            checkpoints.choose(7)
        for step in (2, 4, 6):
            checkpoints.save(step, state, {})
    with Checkpoints(tmp_path / "c", CheckpointConfig(keep=2)) as checkpoints:
        assert checkpoints.steps() == [4, 6] and checkpoints.choose(4) == 4 and checkpoints.choose(None) == 6
        with pytest.raises(CheckpointError, match="checkpoint.resume_step=5: no such checkpoint in .*; present: 4, 6"):
            checkpoints.choose(5)
        moved = checkpoints.set_aside_after(4)
        assert [path.name for path in moved] == ["6"] and moved[0].is_dir() and checkpoints.steps() == [4]
        checkpoints.save(6, state, {})
        assert checkpoints.set_aside_after(4) != [] and checkpoints.set_aside_after(4) == []
    assert sorted(path.name for path in (tmp_path / "c.aside").iterdir()) == ["6", "6.aside-1"]
    shutil.rmtree(tmp_path / "c.aside")
    (tmp_path / "c.aside").touch()
    with Checkpoints(tmp_path / "c", CheckpointConfig(keep=2)) as checkpoints:
        checkpoints.save(6, state, {})
        with pytest.raises(
            CheckpointError, match="c.aside: is a file, and later checkpoints need a folder of that name"
        ):
            checkpoints.set_aside_after(4)
        assert checkpoints.steps() == [4, 6]


def largest(folder, pattern):
    return max(folder.glob(pattern), key=lambda path: path.is_file() and path.stat().st_size)


@pytest.mark.parametrize(
    "part, damage",
    [
        ("state/**/*", lambda data: data[:10]),
        # What Orbax then raises is an Exception and nothing more, with many lines.
        ("state/ocdbt.process_0/d/*", lambda data: data[: len(data) // 2]),
        ("run/metadata", lambda data: b"{}"),
    ],
    ids=["index", "arrays", "run"],
)
def test_damaged_files_are_one_line(tmp_path, make_mesh, part, damage):
    mesh = make_mesh(tp=2)
    state = put(make_state(rows=4096), mesh)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, state, {"data": {}, "seed": 0})
    damaged = largest(tmp_path / "c" / "4", part)
    damaged.write_bytes(damage(damaged.read_bytes()))
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"c/4: cannot be read \(.*\); go on .*resume-step 3$") as error:
            checkpoints.restore(4, place(state, mesh), VOCAB, no_fresh_scales)
        assert "\n" not in str(error.value)
        equal(checkpoints.restore(3, place(state, mesh), VOCAB, no_fresh_scales)[0], state)


def test_an_array_that_cannot_be_read_is_named_and_the_others_say_nothing(tmp_path, make_mesh, monkeypatch):
    """Where the first fails, Orbax leaves the others' coroutines, of which Python reports each with a page."""
    mesh, reported = make_mesh(tp=2), []
    state = put(make_state(rows=4096), mesh)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(4, state, {"data": {}, "seed": 0})
    damaged = largest(tmp_path / "c" / "4", "state/ocdbt.process_0/d/*")
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    message = r"c/4: cannot be read \(of [\w.]+, some is missing or damaged\); no other is before it$"
    with pytest.raises(CheckpointError, match=message), Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.restore(4, place(state, mesh), VOCAB, no_fresh_scales)
    gc.collect()
    assert not reported


@pytest.mark.parametrize("part", ["scales", "scales/_METADATA", "state/_METADATA"])
def test_a_part_that_was_deleted_is_missed(tmp_path, make_mesh, part):
    """A run can do without some parts, but not without those that it saved."""
    mesh = make_mesh(tp=2)
    state = put(make_state(), mesh)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, state, {"data": {}, "seed": 0})
    path = tmp_path / "c" / "4" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    message = rf"c/4: is damaged: not there are {part.split('/')[0]}\..*; go on from .* --checkpoint.resume-step 3$"
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(4, place(state, mesh), VOCAB, no_fresh_scales)


def test_an_existing_checkpoint_is_not_written_again(tmp_path, make_mesh):
    state = put(make_state(), make_mesh())
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, state, {"samples": 1})
        checkpoints.save(1, state, {"samples": 2})
        assert checkpoints.restore(1, place(state, make_mesh()), VOCAB, no_fresh_scales)[1]["samples"] == 1


def test_switched_off(tmp_path, make_mesh):
    with Checkpoints(tmp_path / "c", CheckpointConfig(enabled=False)) as checkpoints:
        checkpoints.save(1, put(make_state(), make_mesh()), {})
        assert checkpoints.steps() == [] and checkpoints.choose(None) is None
    assert not (tmp_path / "c").exists()


def test_workdir_is_created_then_resumed(tmp_path):
    config = TrainConfig(workdir=str(tmp_path / "runs" / "a"))
    assert open_workdir(config) == []
    first = (tmp_path / "runs" / "a" / "config.json").read_text()
    assert json.loads(first)["model"]["d_model"] == 256
    changed = dataclasses.replace(config, steps=5, stop_after=2, mesh=MeshConfig(tp=2))
    assert open_workdir(changed) == ["mesh.tp 1 -> 2", "steps 1000 -> 5"]
    assert (tmp_path / "runs" / "a" / "config.json").read_text() == first


def test_a_changed_bit_is_never_loaded(tmp_path, make_mesh):
    """Anywhere in the largest file of arrays: named, with the step before, on a mesh with another padding."""
    mesh, rng = make_mesh(tp=2), np.random.default_rng(0)
    state = make_state()
    state.params["layers"]["kernel"] = jnp.asarray(rng.normal(size=(2, 16, 64)), jnp.float32)
    target = make_state(72)
    target.params["layers"]["kernel"] = state.params["layers"]["kernel"]
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, put(state, make_mesh(tp=4)), {"seed": 0}, vocabulary=(VOCAB, 64))
    data = largest(tmp_path / "c" / "4", "state/ocdbt.process_0/d/*")
    whole, outcomes = data.read_bytes(), []
    for at in rng.integers(0, len(whole), 10):
        data.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.integers(8)]) + whole[at + 1 :])
        with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
            try:
                restored, _, _ = checkpoints.restore(4, place(target, mesh), VOCAB, no_fresh_scales)
            except CheckpointError as error:
                outcomes.append(str(error))
            else:
                equal(restored.params, target.params)
    damaged = [text for text in outcomes if "c/4: is damaged: not as saved are state.params.layers.kernel" in text]
    assert damaged and all("go on from the one before with --checkpoint.resume-step 3" in text for text in damaged)
    data.write_bytes(whole)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        equal(checkpoints.restore(4, place(target, mesh), VOCAB, no_fresh_scales)[0].params, target.params)


@pytest.mark.parametrize("rows", [60, 64, 72])
def test_a_dim_as_long_as_the_vocabulary_is_compared_whole(tmp_path, make_mesh, rows):
    """Its padding is left out where it differs alone: another dim of that length has none."""

    def made(rows, changed):
        state = make_state(rows)
        kernel = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 64)), jnp.float32)
        state.params["layers"]["kernel"] = kernel.at[1, 0, 60].add(changed)
        return state

    shapes = place(made(rows, 0.0), make_mesh(tp=2))
    for folder, changed in (("c", 0.0), ("other", 1e-6)):
        with Checkpoints(tmp_path / folder, CheckpointConfig()) as checkpoints:
            checkpoints.save(4, put(made(64, changed), make_mesh(tp=4)), {"seed": 0}, vocabulary=(VOCAB, 64))
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        equal(checkpoints.restore(4, shapes, VOCAB, no_fresh_scales)[0], made(rows, 0.0))
    shutil.rmtree(tmp_path / "c" / "4" / "state")
    shutil.copytree(tmp_path / "other" / "4" / "state", tmp_path / "c" / "4" / "state")
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"not as saved are state\.params\.layers\.kernel;"):
            checkpoints.restore(4, shapes, VOCAB, no_fresh_scales)


def test_a_record_of_the_version_before_is_compared(tmp_path, make_mesh, monkeypatch):
    """Its digests leave out what every dim as long as the padded vocabulary has beyond the vocabulary."""

    def as_before(named, size, padded):
        limits = {name: tuple(size if n == padded else n for n in leaf.shape) for name, leaf in named.items()}
        return {"vocabulary": [size, padded], "digests": digests(named, limits)}

    monkeypatch.setattr(checkpoint, "record_of", as_before)
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(4, put(make_state(), make_mesh(tp=4)), {"seed": 0}, vocabulary=(VOCAB, 64))
    for rows in (60, 64, 72):
        with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
            shapes = place(make_state(rows), make_mesh(tp=2))
            restored, run, _ = checkpoints.restore(4, shapes, VOCAB, no_fresh_scales)
            equal(restored, make_state(rows))
            assert run == {"step": 4, "seed": 0}


def test_a_record_says_its_step_and_whether_it_is_whole(tmp_path, make_mesh):
    state, run = put(make_state(), make_mesh()), {"data": {"samples": 8}, "seed": 0}
    shapes = place(make_state(), make_mesh())
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        for step in (3, 4):
            checkpoints.save(step, state, run)
    restore = lambda checkpoints, step: checkpoints.restore(step, shapes, VOCAB, no_fresh_scales)
    (tmp_path / "c" / "4").rename(tmp_path / "c" / "7")
    record = tmp_path / "c" / "7" / "run" / "metadata"
    written = record.read_text()
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        message = r"c/7: is that of step 4, under another name; rename it to 4, or go on .* --checkpoint.resume-step 3$"
        with pytest.raises(CheckpointError, match=message):
            restore(checkpoints, 7)
        shutil.copytree(tmp_path / "c" / "7", tmp_path / "c" / "4")
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"c/7: is that of step 4, .*; move it away \(4 is there\), or go on"):
            restore(checkpoints, 7)
        shutil.rmtree(tmp_path / "c" / "4")
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        record.write_text(written.replace('"samples": 8', '"samples": 9'))
        with pytest.raises(CheckpointError, match=r"c/7: its record is damaged; go on from the one before"):
            restore(checkpoints, 7)
        # As earlier versions wrote it.
        old = {k: v for k, v in json.loads(written).items() if k in ("data", "seed")} | {"step": 7}
        record.write_text(json.dumps(old))
        assert restore(checkpoints, 7)[1] == {"step": 7, **run}


def test_a_checkpoint_of_another_run_is_noticed(tmp_path, make_mesh):
    """Of the same model and step. A workdir that was moved keeps its settings, and earlier records have no digest."""
    state, shapes = put(make_state(), make_mesh()), place(make_state(), make_mesh())
    for name, seed in (("a", 0), ("b", 1)):
        open_workdir(TrainConfig(workdir=str(tmp_path / name), seed=seed))
        with Checkpoints(tmp_path / name / "checkpoints", CheckpointConfig()) as checkpoints:
            for step in (3, 4):
                checkpoints.save(step, state, {"seed": seed})
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    for name in ("a", "moved"):
        shutil.rmtree(tmp_path / name / "checkpoints" / "4")
    shutil.copytree(tmp_path / "b" / "checkpoints" / "4", tmp_path / "a" / "checkpoints" / "4")
    restore = lambda folder, step: folder.restore(step, shapes, VOCAB, no_fresh_scales)[1]
    with Checkpoints(tmp_path / "a" / "checkpoints", CheckpointConfig()) as checkpoints:
        message = r"checkpoints/4: is that of another run \(.*/a/config.json\); move it away, or go on .*resume-step 3$"
        with pytest.raises(CheckpointError, match=message):
            restore(checkpoints, 4)
    with Checkpoints(tmp_path / "moved" / "checkpoints", CheckpointConfig()) as checkpoints:
        assert restore(checkpoints, 3) == {"step": 3, "seed": 0}
    (tmp_path / "a" / "config.json").unlink()
    with Checkpoints(tmp_path / "a" / "checkpoints", CheckpointConfig()) as checkpoints:
        assert restore(checkpoints, 4) == {"step": 4, "seed": 1}


def test_a_folder_that_orbax_cannot_open_is_one_line(tmp_path, make_mesh):
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        checkpoints.save(1, put(make_state(), make_mesh()), {})
    times = tmp_path / "c" / "1" / "_CHECKPOINT_METADATA"
    times.write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"c: cannot be read \(.*\); a file _CHECKPOINT_METADATA in it is damaged"
    ):
        Checkpoints(tmp_path / "c", CheckpointConfig())
    times.unlink()
    with Checkpoints(tmp_path / "c", CheckpointConfig()) as checkpoints:
        assert checkpoints.restore(1, place(make_state(), make_mesh()), VOCAB, no_fresh_scales)[1] == {"step": 1}
    for enabled in (True, False):
        with pytest.raises(CheckpointError, match="metadata: is a file, and checkpoints need a folder of that name"):
            Checkpoints(tmp_path / "c" / "1" / "run" / "metadata", CheckpointConfig(enabled=enabled))


def test_digests_depend_on_values_and_places_alone(make_mesh):
    """Not on meshes, dtypes' padding or what adds them up; one bit is enough to change them."""
    rng, mesh = np.random.default_rng(0), make_mesh(dp=2, tp=4)
    whole = lambda x: digests({"x": x}, {"x": x.shape})["x"]
    for shape, dtype in (((8, 12, 16), "float32"), ((16,), "bfloat16"), ((), "int32"), ((8, 4), "int8")):
        x = jnp.asarray(rng.normal(size=shape) * 9).astype(dtype)
        expected = whole(x)
        for spec in (P(), P("tp") if shape else P(), P(None, None, "tp") if len(shape) == 3 else P()):
            assert whole(jax.device_put(x, NamedSharding(mesh, spec))) == expected
        assert int(digest_on_device(x, np.zeros(x.ndim, np.uint32), x.shape)) == expected
        flat = np.array(x).reshape(-1).view(np.uint8)
        for at in rng.integers(0, flat.size, 20):
            changed = flat.copy()
            changed[at] ^= 1 << rng.integers(8)
            assert whole(jnp.asarray(changed.view(x.dtype).reshape(shape))) != expected
    longer = jnp.pad(x, [(0, 8), (0, 0)], constant_values=3)
    assert digests({"x": longer}, {"x": (8, 4)})["x"] == expected != whole(x[::-1])


def test_a_run_that_is_older_than_a_setting(tmp_path):
    """It had the default, which need not be said now; anything else is another model."""
    config = TrainConfig(workdir=str(tmp_path / "run"))
    open_workdir(config)
    path = tmp_path / "run" / "config.json"
    written = json.loads(path.read_text())
    for key in ("sliding_window", "rope_type", "norm_plus_one"):
        del written["model"][key]
    del written["data"]["document_mask"]
    path.write_text(json.dumps(written))
    assert open_workdir(config) == []
    masked = dataclasses.replace(config, data=DataConfig(document_mask=True))
    assert open_workdir(masked) == ["data.document_mask False -> True"]
    with pytest.raises(ConfigError, match=r"holds another model \(model.sliding_window None -> 8\)"):
        open_workdir(dataclasses.replace(config, model=dataclasses.replace(config.model, sliding_window=8)))


def test_workdir_of_another_model(tmp_path):
    config = TrainConfig(workdir=str(tmp_path / "a"))
    open_workdir(config)
    other = dataclasses.replace(config, model=ModelConfig(n_layers=2, d_mlp=512))
    with pytest.raises(ConfigError, match=r"holds another model \(model.n_layers 4 -> 2, model.d_mlp 768 -> 512\)"):
        open_workdir(other)


def test_folders_that_are_no_workdir(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists but holds no config.json"):
        open_workdir(TrainConfig(workdir=str(tmp_path)))
    with pytest.raises(ConfigError, match="exists but holds no config.json"):
        open_workdir(TrainConfig(workdir=str(tmp_path / "notes.txt")))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: corrupt"):
        open_workdir(TrainConfig(workdir=str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="its config.json is not that of a run, but a model's perhaps; use an empty"):
        open_workdir(TrainConfig(workdir=str(tmp_path)))


def test_a_lock_ends_with_its_process(tmp_path):
    """Killed, it leaves its name in the file and nothing that holds."""
    code = "import time; from taco_jax.train.workdir import locked\nwith locked('.'): print(flush=True); time.sleep(99)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, env=environment)
    try:
        process.stdout.readline()
        with pytest.raises(ConfigError, match=f"another run is working in it \\(process {process.pid} on "):
            with locked(tmp_path):
                pass
    finally:
        process.kill()
        process.communicate()
    with locked(tmp_path) as remarks:
        assert remarks == []


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as (remark,):
        assert "cannot be locked (No locks available): start no second run in it" in remark


def test_set_aside_and_write_text(tmp_path):
    path = tmp_path / "a"
    for text in ("1", "2"):
        write_text(path, text)
        set_aside(path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.aside-1": "1", "a.aside-2": "2"}
