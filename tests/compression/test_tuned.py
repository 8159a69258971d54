"""The file of tuned values: what is read from it when a collective is traced, and what it must look like."""

import json
import os
import tarfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spelled_out
from helpers import REPOSITORY
from hlo import counts
from shards import per_rank

import taco_jax
from pallas_kernels.nvlink import hardware
from taco_jax import Compression
from taco_jax.collectives import comm_log
from taco_jax.compression import tuned
from taco_jax.compression.tuned import Tuned, TunedFileError

NAME = "cpu, 4 ranks, nvlink or pcie p2p"
TACO = Tuned(4096, ((1024, 1, "all_to_all"), (8192, 2, "ring"), (1 << 20, 4, "all_to_all")))


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "tuned.json"
    monkeypatch.setenv("TACO_JAX_TUNED", str(path))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    return path


def test_a_file_of_the_version_before(tmp_path):
    with tarfile.open(REPOSITORY / "tests" / "support" / "before.tar.xz") as files:
        files.extract("before/tuned.json", tmp_path, filter="data")
    best, sums = ((1024, 1, "all_to_all"), (65536, 2, "ring")), ((1024, 1, "one_shot"), (65536, 2, "two_shot"))
    assert tuned.read(tmp_path / "before" / "tuned.json") == {NAME: {"taco": Tuned(4096, best, sums)}}


def test_written_and_read(file):
    assert tuned.read(file) == {}
    tuned.write(file, NAME, {"taco": TACO})
    both = Tuned(None, TACO.best, ((1, 1, "one_shot"), (2, 3, "two_shot")))
    tuned.write(file, NAME, {"int8h": both})
    tuned.write(file, "another machine", {"taco": Tuned(0, TACO.best)})
    assert tuned.read(file) == {
        NAME: {"taco": TACO, "int8h": both}, "another machine": {"taco": Tuned(0, TACO.best)},
    }  # fmt: skip
    assert [p.name for p in file.parent.iterdir()] == ["tuned.json"]


def test_a_message_takes_the_next_smaller_size():
    assert [TACO.transport(n) for n in (1, 1024, 8191, 8192, 1 << 19, 1 << 30)] == [
        (1, "all_to_all"), (1, "all_to_all"), (1, "all_to_all"), (2, "ring"), (2, "ring"), (4, "all_to_all"),
    ]  # fmt: skip


def sent(elements, compression, ranks=4):
    x_P = np.ones((ranks, elements), np.float32)
    f = per_rank(lambda x: taco_jax.tensor_parallel.reduce_from_tp(x, "tp", compression), ranks, invarying_out=True)
    return counts(f.lower(x_P).compile())


def test_layers_do_as_tuned(file):
    tuned.write(file, NAME, {"taco": TACO, "int8h": Tuned(None, TACO.best)})
    assert sent(1023, "taco") == {"all-reduce": 1}  # 4,092 bytes
    assert sent(1024, "taco") == {"all-to-all": 1, "all-gather": 1}
    assert sent(2048, "taco") == {"collective-permute": 6, "all-gather": 2}
    assert sent(1 << 16, "int8h") == {"all-reduce": 1}  # never paid
    assert sent(64, "int6h") == {"all-to-all": 1, "all-gather": 1}  # not measured: the default, on CPU all of them
    assert sent(2048, "taco", ranks=8) == {"all-to-all": 1, "all-gather": 1}
    # What is said wins over what was measured.
    explicit = taco_jax.Compression("int8h", min_bytes=0, chunks=1, exchange="all_to_all")
    assert sent(2048, explicit) == {"all-to-all": 1, "all-gather": 1}


ONE_THEN_TWO = ((1024, 1, "one_shot"), (8192, 4, "two_shot"), (16384, 2, "one_shot"))


def test_a_sum_takes_the_algorithm_that_won(file):
    """On any number of ranks; where nothing was measured two ranks exchange, and more go in two hops."""
    compression = taco_jax.Compression("taco", min_bytes=0)
    for ranks in (2, 4):
        assert sent(512, compression, ranks) == (
            {"all-gather": 1} if ranks == 2 else {"all-to-all": 1, "all-gather": 1}
        )
        tuned.write(file, NAME.replace("4", str(ranks)), {"taco": Tuned(0, TACO.best, ONE_THEN_TWO)})
        assert sent(512, compression, ranks) == {"all-gather": 1}
        first = {"collective-permute": 4 * (ranks - 1)}  # the exchange is that of `best` at this size
        assert sent(2048, compression, ranks) == first | {"all-gather": 4}
        assert sent(4096, compression, ranks) == {"all-gather": 2}
    # What is said wins over what was measured, and levels over both; a file of before has no say in it.
    two_shot = taco_jax.Compression("taco", min_bytes=0, algorithm="two_shot", exchange="all_to_all", chunks=1)
    assert sent(512, two_shot) == {"all-to-all": 1, "all-gather": 1}
    levels = taco_jax.Compression("taco", min_bytes=0, ranks_per_host=2, chunks=1)
    assert sent(512, levels)["all-gather"] > 1
    assert sent(512, compression, 8) == {"all-to-all": 1, "all-gather": 1}
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best)})
    assert sent(512, compression) == {"all-to-all": 1, "all-gather": 1}


def test_only_sums_take_it(file):
    tuned.write(file, NAME, {"taco": Tuned(0, ((1024, 2, "all_to_all"),), ((1024, 1, "one_shot"),))})
    x_P = np.ones((4, 2048), np.float32)
    scatter = per_rank(
        lambda x: taco_jax.psum_scatter(x, "tp", tiled=True, compression=Compression("taco", chunks=None)), 4
    )
    assert counts(scatter.lower(x_P).compile()) == {"all-to-all": 2}
    # The gradient of `copy` is a sum.
    pull = lambda x: jax.vjp(lambda x: taco_jax.copy(x, "tp", compression=Compression("taco", chunks=None)), x)[1]
    back = per_rank(lambda x: pull(jnp.zeros(2048))(x)[0], 4, invarying_out=True)
    assert counts(back.lower(x_P).compile()) == {"all-gather": 1}


def test_sums_with_feedback_take_it(file):
    x_P = np.ones((4, 2048), np.float32)
    sum_of = lambda: per_rank(
        lambda x: taco_jax.psum_with_feedback(x, "tp", compression="taco")[0], 4, invarying_out=True
    )
    assert counts(sum_of().lower(x_P).compile()) == {"all-to-all": 1, "all-gather": 1}
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, ((1024, 1, "one_shot"),))})
    assert counts(sum_of().lower(x_P).compile()) == {"all-gather": 1}


def test_the_site_table_says_which_and_why(file):
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, ONE_THEN_TWO)})
    x_P = np.ones((4, 4096), np.float32)

    def how(**options):
        f = lambda x: spelled_out.psum(x[: options.pop("elements", None)], "tp", **{"chunks": None} | options)
        with comm_log.record() as table:
            per_rank(f, 4, invarying_out=True).lower(x_P)
        (row,) = table.rows()
        return row.how

    assert how() == ("one_shot", "the faster one at 16,384 bytes, as tuned for 4 ranks of this link")
    assert how(elements=2048) == ("two_shot", "the faster one at 8,192 bytes, as tuned for 4 ranks of this link")
    assert how(algorithm="one_shot") == ("one_shot", "as configured")
    assert how(ranks_per_host=2) == ("hierarchical", "its ranks are on several hosts")
    assert how(min_bytes=1 << 20) == ("", "")
    file.unlink()
    assert how() == ("two_shot", "the rule for 4 ranks")


def test_raw_collectives_ask_as_layers_do(file):
    tuned.write(file, NAME, {"taco": TACO})
    x_P = np.ones((4, 2048), np.float32)

    def number(**options):
        f = per_rank(
            lambda x: spelled_out.psum(x, "tp", **{"min_bytes": None, "chunks": None} | options), 4, invarying_out=True
        )
        return counts(f.lower(x_P).compile())

    assert number() == {"collective-permute": 6, "all-gather": 2}
    assert number(chunks=1) == {"collective-permute": 3, "all-gather": 1}
    assert number(min_bytes=1 << 20) == {"all-reduce": 1}
    x_P = np.ones((4, 512), np.float32)
    assert number() == {"all-reduce": 1} and number(min_bytes=0) == {"all-to-all": 1, "all-gather": 1}


def test_each_direction_has_its_codecs_crossover(file):
    tuned.write(file, NAME, {"taco": TACO, "int8h": Tuned(None, TACO.best)})
    x_P = np.ones((4, 1024), np.float32)
    compression = taco_jax.Compression("taco", backward="int8h")

    def local(x):
        import jax

        y, pull = jax.vjp(lambda x: taco_jax.tensor_parallel.gather_from_sp(x, "tp", compression, dim=0), x)
        return pull(y)[0]

    number = counts(per_rank(local, 4).lower(x_P).compile())
    assert number["reduce-scatter"] == 1 and number["all-gather"] >= 1 and "all-to-all" not in number


def test_the_file_of_a_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("TACO_JAX_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned.path("cpu") is None
    assert tuned.path("gpu") == tuned.default_path() == tmp_path / "taco_jax" / "tuned.json"
    monkeypatch.setenv("TACO_JAX_TUNED", "")
    assert tuned.path("gpu") is None


@pytest.mark.parametrize(
    "platform, missing, link, expected",
    [
        ("gpu", "no", "auto", 1 << 20),
        ("gpu", None, "auto", (4 if jax.__version_info__ >= (0, 11) else 64) << 20),
        ("gpu", None, "nccl", 64 << 20),
        ("cpu", None, "auto", 0),
    ],
)
def test_the_default_is_the_links(platform, missing, link, expected, monkeypatch):
    monkeypatch.setattr(hardware, "missing", lambda kind: missing)
    device = SimpleNamespace(platform=platform, device_kind="some kind", compute_capability="9.0")
    assert tuned.default_min_bytes("taco", 4, device, link) == expected


def test_the_default_of_gpus_without_nvlink_kernels(monkeypatch):
    monkeypatch.setattr(hardware, "missing", lambda kind: None)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB", compute_capability="8.0")
    assert tuned.default_min_bytes("taco", 4, device) == 64 << 20


@pytest.mark.parametrize(
    "environment,label",
    [
        ({}, "nvlink or pcie p2p"),
        ({"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "1"}, "nvlink or pcie p2p"),
        ({"NCCL_P2P_DISABLE": "1"}, "host memory"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "sockets"),
    ],
)
def test_links(environment, label):
    assert tuned.link_label(environment) == label


def entry(**changes):
    return {"min_bytes": 1, "best": [{"bytes": 1, "chunks": 1, "exchange": "ring"}]} | changes


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "is no JSON file"),
        ("[]", "the file=[]: must be an object"),
        (json.dumps({"a": 3}), "a=3: must be an object"),
        (json.dumps({"a": {"taco": entry(min_bytes="1")}}), "'a': taco.min_bytes=\"1\": must be a number of bytes"),
        (json.dumps({"a": {"taco": entry(best=[])}}), "'a': taco.best=[]: must be a list"),
        (json.dumps({"a": {"taco": entry(more=1)}}), "'a': taco.more=1: must have exactly the keys"),
        (
            json.dumps({"a": {"taco": entry(best=[{"bytes": 1, "chunks": 0, "exchange": "ring"}])}}),
            "taco.best[0].chunks=0: must be a number from 1 to 1024",
        ),
        (
            json.dumps({"a": {"taco": entry(best=[{"bytes": 1, "chunks": 10**8, "exchange": "ring"}])}}),
            "taco.best[0].chunks=100000000: must be a number from 1 to 1024",
        ),
        (
            json.dumps({"a": {"taco": entry(best=[{"bytes": 1, "chunks": 1, "exchange": "ring", "x": 2}])}}),
            "taco.best[0].x=2: must have exactly the keys bytes, chunks and exchange",
        ),
        (
            json.dumps({"a": {"taco": entry(sums=[{"bytes": 1, "chunks": 1, "algorithm": "ring"}])}}),
            'taco.sums[0].algorithm="ring": must be one_shot or two_shot',
        ),
        (json.dumps({"a": {"taco": entry(sums=[])}}), "'a': taco.sums=[]: must be a list"),
        (json.dumps({"a": {"tacoo": entry()}}), "'a': tacoo={\"min_bytes\": 1"),
        (json.dumps({"a": {"none": entry()}}), "must be a codec preset that compresses; repair it, or delete the file"),
        ("[" * 100000, "is no JSON file (nested too deeply); repair it, or delete the file and run python -m"),
        (
            json.dumps({"a": {"taco": entry(best=[{"bytes": 1, "chunks": 1, "exchange": "auto"}])}}),
            'taco.best[0].exchange="auto": must be all_to_all or ring',
        ),
    ],
)
def test_a_bad_file_names_itself_and_the_key(text, message, file):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(TunedFileError) as error:
        sent(64, "taco")
    assert message in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_where_no_file_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TunedFileError, match=r"is a folder; name a file in it, for example .*/tuned.json"):
        tuned.check_writable(tmp_path)
    with pytest.raises(TunedFileError, match="cannot be written .*; name a file in a folder that can be made"):
        tuned.write(tmp_path / "file" / "tuned.json", NAME, {"taco": TACO})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(TunedFileError, match="cannot be read"):
        tuned.read(tmp_path)


def test_a_bad_file_is_one_line_of_the_trainer(file, capsys, tmp_path):
    from taco_jax.config import cli
    from taco_jax.train.loop import main

    file.parent.mkdir()
    file.write_text("nonsense")
    assert cli.run(main, ["--mesh.tp", "2", "--workdir", str(tmp_path / "run"), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: compression: {file}: is no JSON file")


def test_a_new_file_is_seen(file):
    tuned.write(file, NAME, {"taco": TACO})
    assert tuned.read(file)[NAME]["taco"].min_bytes == 4096
    tuned.write(file, NAME, {"taco": Tuned(1, TACO.best)})
    os.utime(file, ns=(1, 1))  # whatever the clock's resolution
    assert tuned.read(file)[NAME]["taco"].min_bytes == 1
