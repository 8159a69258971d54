"""The committed files of `python -m taco_jax.tune`: by their times no message is slower than exact, in layers too."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import REPOSITORY
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax import Compression
from taco_jax.collectives import comm_log, to_varying
from taco_jax.compression import timings, tuned
from taco_jax.compression.timings import Row, Time, Way

RECORDS = sorted((REPOSITORY / "experiments" / "results").glob("tune_*/tuned.json"))
FILES = [*RECORDS, tuned.MEASURED, "made"]
SMALL = 4 << 20  # of these sizes layers are traced


@pytest.fixture(params=FILES, ids=lambda file: file if file == "made" else f"{file.parent.name}/{file.name}")
def content(request, tmp_path):
    """A file's JSON. The made one has everything that goes wrong: ways that cross, noise, a codec that never pays."""
    file = request.param
    if file == "made":
        file = tmp_path / "tuned.json"
        one, two, kernel = Way("nccl", "one_shot"), Way("nccl", "two_shot", 2), Way("nvlink", "one_shot")
        row = lambda n, exact, **ways: Row(
            n << 10, Time(10.0, 0.1), Time(exact, 0.5),
            {way: Time(ways[name], 0.5) for name, way in (("a", one), ("b", two), ("c", kernel)) if name in ways},
        )  # fmt: skip
        sums = (row(128, 30.0, a=45.0, b=50.0), row(256, 40.0, a=39.5, b=50.0), row(512, 60.0, a=40.0, b=50.0, c=30.0),
                row(1024, 60.0, a=70.0, b=50.0, c=59.0), row(4096, 90.0, a=95.0, b=60.0, c=50.0))  # fmt: skip
        others = {"psum_scatter": (row(512, 40.0, a=20.0),), "all_gather": (row(512, 40.0, a=60.0),)}
        best = ((1 << 17, 1, "all_to_all"),)
        tuned.write(file, "some GPU, 2 ranks, host memory", {"taco": tuned.Tuned(1 << 19, best, (), {"psum": sums})})
        tuned.write(file, "some GPU, 2 ranks, nvlink or pcie p2p", {
            "taco": tuned.Tuned(1 << 19, best, (), {"psum": sums} | others),
            "int4h": tuned.Tuned(None, best, (), {"psum": (row(512, 40.0, a=60.0, c=39.9),)}),
        })  # fmt: skip
    return json.loads(file.read_text())


def named(file, entry: str, codec: str):
    return tuned.read(file)[entry][codec]


def test_no_message_is_slower_than_exact_by_the_files_times(content, tmp_path):
    """Against the numbers as they stand in the file: what is taken beats exact at both ends, and what goes exactly
    could not have gone faster beyond noise at the measured sizes."""
    file = tmp_path / "copy.json"
    file.write_text(json.dumps(content))
    for entry, codecs in content.items():
        for codec, value in codecs.items():
            for operation, rows in value["times"].items():
                read, by_size = named(file, entry, codec).times[operation], {row["bytes"]: row for row in rows}
                for links in ({"nccl"}, {"nccl", "nvlink"}):
                    for nbytes in sizes(by_size):
                        found = timings.decide(read, nbytes, lambda way, links=links: way.link in links)
                        judge(found, nbytes, by_size, links)


def sizes(measured) -> list[int]:
    """Every measured size, what is beside it, and sizes between."""
    ends = sorted(measured)
    between = [a + (b - a) * k // 4 for a, b in itertools.pairwise(ends) for k in (1, 2, 3)]
    return sorted({*ends, *between, *(n + d for n in ends for d in (-2, 2)), 2 * ends[-1]})


def judge(found, nbytes: int, rows: dict[int, dict], links: set[str]) -> None:
    below, above = [n for n in rows if n <= nbytes], [n for n in rows if n >= nbytes]
    ends = {max(below)} | ({min(above)} if above else set()) if below else set()
    times = lambda row: {tuple(w[f] for f in Way._fields): w["us"] for w in row["ways"] if w["link"] in links}
    if found is not None:
        assert ends, f"{nbytes}: nothing so small was measured"
        for row in map(rows.get, ends):
            (us, spread), (exact, exact_spread) = times(row)[tuple(found[0])], row["exact"]
            assert us + spread + exact_spread < exact, (nbytes, found, row["bytes"])
    if nbytes in rows:
        row = rows[nbytes]
        (exact, exact_spread), (free, _) = row["exact"], row["free"]
        fastest, noise = min(times(row).values(), default=(np.inf, 0.0)), 0.05 * (exact - free)
        if found is None:
            assert fastest[0] + max(fastest[1] + exact_spread, noise) >= exact, (nbytes, "could have gone faster")
        else:
            assert times(row)[tuple(found[0])][0] == fastest[0], (nbytes, "not the fastest way")


def test_layers_take_what_the_times_say(content, tmp_path, monkeypatch):
    """Each entry as if the emulator were its GPUs: the site table of both directions of a sum, of a scatter and of a
    gather, against the file's times."""
    file = tmp_path / "tuned.json"
    monkeypatch.setenv("TACO_JAX_TUNED", str(file))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for entry, codecs in content.items():
        ranks = int(entry.split(", ")[1].split()[0])
        kernels = "nvlink" in entry
        monkeypatch.setattr(tuned, "in_one_kernel", lambda device, link, kernels=kernels: kernels and link != "nccl")
        file.write_text(json.dumps({tuned.entry_name("cpu", ranks): codecs}))
        links = {"nccl", "nvlink"} if kernels else {"nccl"}
        for codec, value in codecs.items():
            psum = {row["bytes"] for row in value["times"]["psum"] if row["bytes"] <= SMALL}
            for nbytes in sorted(psum | {n * 3 // 2 for n in psum})[:6]:
                expect(sites(codec, nbytes, ranks), tuned.read(file), codec, nbytes, links=links)


def sites(codec: str, nbytes: int, ranks: int) -> dict[tuple[str, str], tuple[str, str]]:
    """{(operation, direction): (codec, algorithm)} of a layer's messages."""
    how, n = Compression(codec), nbytes // 2 // ranks * ranks

    def local(x_1S):
        x = x_1S[0]
        y, pull = jax.vjp(
            lambda x: taco_jax.psum(taco_jax.copy(x, "tp", compression=how) * 2, "tp", compression=how), x
        )
        scatter = lambda x: taco_jax.psum_scatter(x, "tp", compression=how, tiled=True)
        z, back = jax.vjp(scatter, to_varying(x, "tp"))
        return (pull(y)[0].sum() + back(z)[0].sum())[None]

    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    with comm_log.record() as table:
        run = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("tp"))
        jax.eval_shape(run, jax.ShapeDtypeStruct((1, n), jnp.bfloat16))
    return {(row.op, row.direction): (row.codec, row.how[0]) for row in table.rows()}


def expect(found, entries, codec: str, nbytes: int, *, links: set[str]) -> None:
    ((_, codecs),) = entries.items()
    times = codecs[codec].times
    for operation, direction in (("psum", "forward"), ("psum", "backward"), ("psum_scatter", "forward"),
                                 ("all_gather", "backward")):  # fmt: skip
        if operation not in times:
            continue
        decided = timings.decide(times[operation], nbytes, lambda way: way.link in links)
        sent, algorithm = found[operation, direction]
        assert sent == ("none" if decided is None else codec), (operation, direction, nbytes)
        if operation == "psum" and decided is not None:
            assert algorithm == decided[0].algorithm, (direction, nbytes)


def test_what_is_shipped_is_what_was_recorded():
    recorded: dict = {}
    for file in RECORDS:
        for entry, codecs in json.loads(file.read_text()).items():
            recorded.setdefault(entry, {}).update(codecs)
    shipped = json.loads(tuned.MEASURED.read_text())
    assert shipped == recorded, f"bring the records into {tuned.MEASURED.name}"


def test_the_judge_sees_a_choice_that_loses():
    rows = {8: {"bytes": 8, "free": [1, 0], "exact": [10, 0.1], "ways": [Way()._asdict() | {"us": [9.95, 0.1]}]}}
    judge(None, 8, rows, {"nccl"})
    with pytest.raises(AssertionError):
        judge((Way(), 8), 8, rows, {"nccl"})
    rows[8]["ways"][0]["us"] = [5, 0.1]
    judge((Way(), 8), 8, rows, {"nccl"})
    with pytest.raises(AssertionError, match="could have gone faster"):
        judge(None, 8, rows, {"nccl"})
