"""`taco_jax.compressed("plan.json")`: the plan of a file, by axis, operation and op_name."""

import json
import re

import jax
import pytest
from dropin_programs import UNFUSED, check_close, check_equal, mesh, sharded, sites
from dropin_programs import fresh as named
from jax import lax
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.compression.plan_file import CollectivePlan, PlanFile, write
from taco_jax.dropin import DropInError
from taco_jax.dropin.plan import parse_plan


def sums(names, *, after=lambda *ys: ys):
    """(jit of a function with one sum over tensor for each name, in a scope of that name; its arguments)."""
    on = mesh(tensor=4)

    def local(*xs):
        ys = []
        for name, x in zip(names, xs):
            with jax.named_scope(name):
                ys.append(lax.psum(x * 2, "tensor"))
        return after(*ys)

    specs = (P("tensor"),) * len(names)
    f = jax.jit(named(jax.shard_map(local, mesh=on, in_specs=specs, out_specs=P())))
    keys = jax.random.split(jax.random.key(3), len(names))
    return f, [sharded(on, jax.random.normal(key, (4 * 64, 512)), "tensor") for key in keys]


def plan_file(path, *lines):
    write(PlanFile(collectives=tuple(CollectivePlan(*line) for line in lines)), path)
    return path


def test_every_line_has_its_codec(tmp_path):
    f, args = sums(["attention", "mlp", "head"])
    path = plan_file(
        tmp_path / "plan.json",
        ("tensor", "all_reduce", "*/mlp/*", "int4h"),
        ("tensor", "psum", "*/head/*", "none"),
        ("tensor", "*", "*", "int8h"),
    )
    exact = f(*args)
    with taco_jax.compressed(str(path), require=1 / 3) as report:
        ours = f(*args)
    codecs = {site.op_name.split("/")[-2]: site.codec for site in sites(report, f)}
    assert codecs == {"attention": "int8h", "mlp": "int4h", "head": "none"}
    check_equal(exact[2], ours[2])
    check_close(exact[0], ours[0], 0.01)


def test_install_takes_a_file_and_lines_that_match_nothing_are_told(tmp_path):
    """A file has a line for each collective of the run that it was measured in."""
    f, args = sums(["mlp"])
    path = plan_file(
        tmp_path / "plan.json", ("tensor", "*", "*/mlp/*", "int8h"), ("tensor", "all_gather", "*/eval/*", "int4h")
    )
    installed = taco_jax.install(path)
    try:
        f(*args)
        installed.check()
        line = f"{path}: 1 of 2 lines match no collective of these programs, such as tensor/all_gather/*/eval/*"
        assert line in str(installed.report).splitlines()
    finally:
        installed.remove()


def test_a_plan_of_another_program(tmp_path):
    f, args = sums(["mlp"])
    path = plan_file(tmp_path / "plan.json", ("tensor", "all_reduce", "*attention*", "int8h"))
    line = f"nothing was compressed: no line of {path} matches a collective of these programs; measure them: "
    with pytest.raises(DropInError, match=f"^{re.escape(line)}"), taco_jax.compressed(path):
        f(*args)


def test_sums_of_two_lines_of_one_codec_are_one_message(tmp_path):
    """As the gradients of q and k: a file has a line for each, and nothing is lost by it."""
    f, args = sums(["q", "k"], after=lambda q, k: q + k)

    f = jax.jit(f.__wrapped__, compiler_options=UNFUSED)
    lines = [("tensor", "all_reduce", "*/q/*", "int8h"), ("tensor", "all_reduce", "*/k/*", "int8h")]
    with taco_jax.compressed(plan_file(tmp_path / "plan.json", *lines)) as report:
        ours = f(*args)
    (site,) = sites(report, f)
    assert site.compressed and "match no collective" not in str(report)
    check_close(f(*args), ours, 0.01)
    apart = plan_file(tmp_path / "apart.json", lines[0], (*lines[1][:3], "int6h"))
    with taco_jax.compressed(apart) as report:
        f(*args)
    assert {site.codec for site in sites(report, f)} == {"int8h", "int6h"}


LINE = {"axis": "tensor", "operation": "all_reduce", "pattern": "*", "codec": "int8h"}


@pytest.mark.parametrize(
    "changes,line",
    [
        ({"collectives": []}, "names no collective; for a program that is not ours measure one: python -m"),
        ({"collectives": [], "sites": {"embed": {"forward": "int8h", "backward": "none"}}},
         "is a plan for the sites of a model of taco_jax; take it with --compression.plan (trainer) or --compression "
         "(inference); for a program that is not ours measure one: python -m taco_jax.run --calibrate plan.json"),
        ({"collectives": [LINE, LINE | {"operation": "gather"}]}, "collectives[1]: operation='gather': is no"),
        ({"collectives": [LINE | {"axis": "a+a"}]}, "collectives[0]: axis 'a+a': names an axis twice; name each once"),
        ({"collectives": [LINE | {"codec": "int8h,rounding=stochastic"}]},
         "collectives[0]: codec: rounding='stochastic' needs a new key at every step; use 'nearest'"),
        ({"collectives": [LINE, LINE]}, "tensor/all_reduce: is given twice; name each axis, operation and"),
        ({"collectives": [LINE | {"codec": "int9"}]}, "collectives[0]: codec='int9' is unknown: did you mean"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be(changes, line, tmp_path, capsys, monkeypatch):
    from taco_jax.dropin.command import run

    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "taco_jax plan", "version": 1, "sites": {}} | changes))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {line}')}") as error, taco_jax.compressed(str(path)):
        raise AssertionError
    assert "\n" not in str(error.value)
    (tmp_path / "script.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    assert run(["--compress", "plan.json", "--", "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: plan.json: {line}") and error.count("\n") == 1


def test_a_collective_without_a_name_has_a_line_of_its_own(tmp_path):
    """XLA writes such ones, as where it moves a result to other devices."""
    path = plan_file(tmp_path / "plan.json", ("tensor", "*", "*", "int8h"), ("tensor", "all_reduce", "", "int4h"))
    first, second = parse_plan(path).rules
    assert first.compression.forward == "int4h" and first.matches("all_reduce", "")
    assert not first.matches("all_reduce", "jit(f)/dot") and second.matches("all_reduce", "jit(f)/dot")


def test_a_file_beside_other_lines(tmp_path, capsys, monkeypatch):
    from taco_jax.dropin.command import run

    (tmp_path / "script.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    for args, line in {
        ("plan.json", "data=int8h"): "compress: plan.json: a plan file stands alone; leave out what is beside it",
        ("plan.json",): "plan.json: not found; measure one: python -m taco_jax.run --calibrate plan.json -- ...",
    }.items():
        assert run(["--compress", *args, "--", "script.py"]) == 2
        assert capsys.readouterr().err == f"error: {line}\n"
