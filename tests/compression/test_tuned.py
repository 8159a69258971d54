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
from taco_jax.compression.timings import Row, Time, Way
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


ONE, RING = Way("nccl", "one_shot"), Way("nccl", "two_shot", 2, "ring")


def timed(nbytes, *ways, exact=50.0):
    return Row(nbytes, Time(10.0), Time(exact, 0.5), {way: Time(us, 0.5) for way, us in ways})


SUMS = (timed(4096, (ONE, 49.0), (RING, 60.0)), timed(8192, (ONE, 30.0), (RING, 60.0)),
        timed(32768, (ONE, 30.0), (RING, 20.0)))  # fmt: skip


def test_times_are_written_and_read(file):
    others = {"ppermute": (timed(4096, (Way(chunks=3), 1.25)),), "all_gather": (timed(8, (Way("nvlink"), 1.0)),)}
    tuned.write(file, NAME, {"taco": Tuned(4096, TACO.best, (), {"psum": SUMS} | others)})
    tuned.write(file, NAME, {"int8h": TACO})
    assert tuned.read(file)[NAME] == {"taco": Tuned(4096, TACO.best, (), {"psum": SUMS} | others), "int8h": TACO}


def test_layers_do_as_timed(file):
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, ((4096, 4, "two_shot"),), {"psum": SUMS})})
    exact, one = {"all-reduce": 1}, {"all-gather": 1}
    ring = {"collective-permute": 6, "all-gather": 2}
    # At 4 KiB one shot is faster than exact, but within the margin; between 4 and 8 KiB nothing pays at both ends.
    for nbytes, expected in {4096: exact, 8188: exact, 16384: one, 32768: ring}.items():
        assert sent(nbytes // 4, "taco") == expected, nbytes
    # What is said wins over what was measured, and then the fastest of what is left is taken.
    assert sent(1024, Compression("taco", min_bytes=0)) == one
    assert sent(1024, Compression("taco", min_bytes=0, algorithm="two_shot")) == ring
    assert sent(8192, Compression("taco", min_bytes=1 << 20)) == exact
    assert sent(2048, Compression("taco", algorithm="two_shot")) == exact  # two shots do not pay there
    assert sent(8192, Compression("taco", chunks=1)) == {"collective-permute": 3, "all-gather": 1}
    # A time for 4 ranks says nothing of 8, nor of ranks on two hosts.
    assert sent(1024, "taco", ranks=8) == {"all-to-all": 1, "all-gather": 1}
    assert sent(2048, Compression("taco", ranks_per_host=2))["all-gather"] > 1


def test_each_operation_goes_by_its_own_times(file):
    pays, never = timed(4096, (Way(), 20.0)), timed(4096, (Way(), 60.0))
    times = {"psum": (timed(4096, (ONE, 60.0)),), "psum_scatter": (pays,), "all_gather": (never,)}
    tuned.write(file, NAME, {"taco": Tuned(None, TACO.best, (), times)})
    x_P = np.ones((4, 4096), np.float32)
    of = lambda f: counts(per_rank(f, 4).lower(x_P).compile())
    as_tuned = {"compression": Compression("taco"), "tiled": True}
    scatter = lambda x: taco_jax.psum_scatter(x, "tp", **as_tuned)
    assert of(scatter) == {"all-to-all": 1}
    assert of(lambda x: taco_jax.all_gather(x, "tp", **as_tuned)) == {"all-gather": 1}
    # The gradient of a scatter is a gather, and goes exactly: its one collective is of floats.
    with comm_log.record() as table:
        per_rank(lambda x: jax.vjp(scatter, x)[1](x[:1024])[0], 4).lower(x_P)
    assert {row.op: row.codec for row in table.rows()} == {"psum_scatter": "taco", "all_gather": "none"}
    # Of a link whose sums were timed, what was not timed goes by the default; on the emulator that is all of it.
    perm = [(0, 1), (1, 0)]
    moved = of(lambda x: taco_jax.ppermute(x, "tp", perm, compression="taco"))
    assert moved == {"collective-permute": 1}


def test_sums_go_by_a_file_of_before_also_with_times_of_others(file, monkeypatch):
    monkeypatch.setattr(tuned, "untuned_min_bytes", lambda device, link: 1 << 20)
    best, times = ((4096, 1, "all_to_all"),), {"all_gather": (timed(4096, (Way(), 20.0)),)}
    tuned.write(file, NAME, {"taco": Tuned(4096, best, (), times)})
    assert sent(512, "taco") == {"all-reduce": 1}
    assert sent(2048, "taco") == {"all-to-all": 1, "all-gather": 1}
    # The file says nothing of a scatter.
    scatter = lambda x: taco_jax.psum_scatter(x, "tp", tiled=True, compression=Compression("taco"))
    with comm_log.record() as table:
        per_rank(scatter, 4).lower(np.ones((4, 4096), np.float32))
    assert {row.codec for row in table.rows() if row.op == "psum_scatter"} == {"none"}


def test_a_sum_with_feedback_takes_a_way_that_it_has(file, monkeypatch):
    """One kernel over NVLink keeps no wires: of what was timed only separate kernels count."""
    kernel = Way("nvlink", "one_shot")
    monkeypatch.setattr(tuned, "in_one_kernel", lambda device, link: link != "nccl")
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, (), {"psum": (timed(4096, (kernel, 20.0), (ONE, 60.0)),)})})
    x_P = np.ones((4, 2048), np.float32)
    with_feedback = lambda x: taco_jax.psum_with_feedback(x, "tp", compression="taco")[0]
    assert counts(per_rank(with_feedback, 4, invarying_out=True).lower(x_P).compile()) == {"all-reduce": 1}
    # Without feedback the kernel's time says that it pays (and the emulator, which has none, takes its algorithm).
    assert sent(2048, "taco") == {"all-gather": 1}
    assert sent(2048, Compression("taco", link="nccl")) == {"all-reduce": 1}


@pytest.mark.parametrize("kernel, separate, link", [(20.0, 30.0, "auto"), (30.0, 20.0, "nccl")])
def test_a_message_takes_the_link_that_was_faster(kernel, separate, link, file, monkeypatch):
    from taco_jax.collectives.call import check_call
    from taco_jax.collectives.message import Label

    monkeypatch.setattr(tuned, "in_one_kernel", lambda device, link: link != "nccl")
    rows = (timed(4096, (Way("nvlink", "two_shot"), kernel), (ONE, separate)),)
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, (), {"psum": rows})})
    found = []

    def local(x):
        found.append(check_call("psum", "tp", Compression("taco")).message(Label(), x.shape, x.nbytes))
        return x

    per_rank(local, 4).lower(np.ones((4, 2048), np.float32))
    assert found[0].link == link and found[0].algorithm == ("two_shot" if link == "auto" else "one_shot")
    assert found[0].how[1] == "the fastest one at 4,096 bytes, as tuned for 4 ranks of this link"


def test_what_is_shipped_is_for_gpus_whose_file_says_nothing(file, monkeypatch, tmp_path):
    kind = "some GPU"
    device = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability="9.0")
    monkeypatch.setattr(tuned, "MEASURED", tmp_path / "measured.json")
    tuned.write(tuned.MEASURED, tuned.entry_name(kind, 4), {"taco": Tuned(8192, TACO.best)})
    assert tuned.find("taco", 4, device) == Tuned(8192, TACO.best) and tuned.origin("taco", 4, device) == tuned.MEASURED
    assert tuned.find("int8h", 4, device) is None and tuned.find("taco", 2, device) is None
    tuned.write(file, tuned.entry_name(kind, 4), {"taco": TACO})
    assert tuned.find("taco", 4, device) == TACO and tuned.origin("taco", 4, device) == file
    assert tuned.find("taco", 4, SimpleNamespace(platform="cpu", device_kind=kind)) == TACO
    file.unlink()
    assert tuned.find("taco", 4, SimpleNamespace(platform="cpu", device_kind=kind)) is None
    monkeypatch.setenv("TACO_JAX_TUNED", "")
    assert tuned.find("taco", 4, device) is None


def test_the_threshold_of_sums_is_that_of_their_times(file):
    device = jax.devices()[0]
    tuned.write(file, NAME, {"taco": Tuned(0, TACO.best, (), {"psum": SUMS}), "int8h": TACO})
    assert tuned.default_min_bytes("taco", 4, device) == 8192 and tuned.default_min_bytes("int8h", 4, device) == 4096
    assert tuned.default_min_bytes("taco", 4, device, link="nvlink") == tuned.NEVER


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


def time_row(**changes):
    return {"bytes": 1, "free": [0, 0], "exact": [1, 0], "ways": [Way()._asdict() | {"us": [1, 0]}]} | changes


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
        (
            json.dumps({"a": {"taco": entry(times={"psums": []})}}),
            "taco.times.psums=[]: must be one of psum, psum_scat",
        ),
        (
            json.dumps({"a": {"taco": entry(times={"psum": [{"bytes": 1}]})}}),
            "taco.times.psum[0].exact=null: must have ",
        ),
        (
            json.dumps({"a": {"taco": entry(times={"psum": [time_row(exact=[1])]})}}),
            "taco.times.psum[0].exact=[1]: must be [median, spread] in microseconds",
        ),
        (
            json.dumps(
                {"a": {"taco": entry(times={"psum": [time_row(ways=[dict(Way()._asdict(), us=[1, 1], link="tcp")])]})}}
            ),
            'taco.times.psum[0].ways[0].link="tcp": must be nccl or nvlink',
        ),
        (json.dumps({"a": {"taco": entry(times={"psum": [time_row()] * 2})}}), ": must have each size once; repair it"),
        (
            json.dumps({"a": {"taco": entry(times={"psum": [time_row(ways=time_row()["ways"] * 2)]})}}),
            ": must have each way once; repair it",
        ),
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
