"""`python -m taco_jax.run`: another program, a module or a script, from outside."""

import pytest
from helpers import run_python

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

print("name", __name__, "argv", sys.argv[1:], "folder on path", "here" in sys.path[0])
mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
random = lambda key, shape: jax.random.normal(jax.random.key(key), shape)
put = lambda key, shape, *spec: jax.device_put(random(key, shape), NamedSharding(mesh, P(*spec)))
x, w = put(0, (256, 1024), None, "tensor"), put(1, (1024, 512), "tensor")
y = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P()))(x, w)
exact = jnp.asarray(jax.device_get(x)) @ jnp.asarray(jax.device_get(w))
print("error", float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)) > 1e-3)
if "fails" in sys.argv:
    raise SystemExit(7)
"""
LINE = "tensor: 786,432 bytes before, 202,752 after, 3.88 times fewer"


@pytest.fixture
def run(tmp_path):
    """run(arguments...): the command in a folder that has here/script.py and the module here.module."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in ("script.py", "module.py"):
        (folder / name).write_text(PROGRAM)

    def command(*args, check=0):
        return run_python(["-m", "taco_jax.run", *args], devices=None, cwd=tmp_path, check=check)

    return command


def test_a_script(run):
    result = run(
        "--compress", "tensor=int8h", "--devices", "cpu:4", "--require", "0.95", "--", "here/script.py", "--a", "--b=c"
    )
    assert result.stdout.splitlines() == ["name __main__ argv ['--a', '--b=c'] folder on path True", "error True"]
    assert LINE in result.stderr


@pytest.mark.slow
def test_a_module_and_a_report_in_a_file(run, tmp_path):
    report = tmp_path / "report.txt"
    result = run(
        "--compress",
        "tensor/all_reduce=int8h",
        "--devices",
        "cpu:4",
        "--report",
        report,
        "--",
        "-m",
        "here.module",
        "x",
    )
    assert result.stdout.splitlines()[1] == "error True" and LINE not in result.stderr
    assert report.read_text().splitlines()[-1] == LINE


def test_the_exit_code_is_the_programs(run):
    base = ("--compress", "tensor=int8h", "--devices", "cpu:4")
    assert LINE in run(*base, "--", "here/script.py", "fails", check=7).stderr


OWN = """
import os, sys
print(type(sys.stdout).__name__)
os.chdir(os.path.dirname(os.getcwd()))
if "full" in sys.argv:
    os.rmdir("here/reports")
    raise SystemExit
raise OSError(36, "its own error", "a long name")
"""


@pytest.mark.parametrize("ends", ["an error", "full"])
def test_the_program_is_on_its_own(ends, tmp_path):
    """Its output and errors are as without the command; the report goes where the command's folder was, or is shown."""
    folder = tmp_path / "here" / "reports"
    folder.mkdir(parents=True)
    (tmp_path / "here" / "own.py").write_text(OWN)
    args = ["-m", "taco_jax.run", "--compress", "tensor=int8h", "--report", "reports/r.txt", "--", "own.py", ends]
    result = run_python(args, devices=None, cwd=folder.parent, check=1)
    assert result.stdout == "TextIOWrapper\n"
    if ends == "full":
        report, line, nothing = result.stderr.splitlines()[-3:]
        assert report == "tensor: 0 bytes before, 0 after" and nothing.startswith("error: nothing was compressed")
        assert line == f"error: report={folder}/r.txt: No such file or directory; it is above"
    else:
        assert result.stderr.splitlines()[-1] == "OSError: [Errno 36] its own error: 'a long name'"
        assert (folder / "r.txt").read_text().splitlines()[-1] == "tensor: 0 bytes before, 0 after"


@pytest.mark.slow
def test_the_exit_code_of_a_plan_that_does_nothing(run):
    result = run(
        "--compress", "tensor=int8h", "--min-bytes", "1000000000", "--devices", "cpu:4", "--", "here/script.py", check=1
    )
    assert result.stderr.splitlines()[-1].startswith("error: nothing was compressed: 524,288 bytes, below min_bytes=")
    result = run("--compress", "tensor=int8h", "fsdp=int8h", "--devices", "cpu:4", "--", "here/script.py", check=1)
    assert (
        result.stderr.splitlines()[-1]
        == "error: plan: axis 'fsdp' is of no mesh of the programs; their axes are tensor"
    )


@pytest.mark.parametrize(
    "args,line",
    [
        (["--", "here/script.py"], "compress: must name an axis and a codec, such as --compress tensor=int8h"),
        (["--compress", "tensor=int8h"], "no program; give the program after --, such as: -- -m some.package.train"),
        (["--compress", "tensor=int8h", "--"], "no program; give the program after --"),
        (["--compress", "tensor=int8h", "--", "there.py"], "there.py: no such file; give the program after --"),
        (["--compress", "tensor=int8h", "--", "-m"], "-m: needs a module; give the program after --"),
        (["--compress", "tensor=int8h", "--", "-m", "no.such"], "-m no.such: no such module here; give the program"),
        (["--compress", "tensor=int8", "--", "here/script.py"], "compress: plan: tensor: compression='int8' is"),
        (["--compress", "tensor", "--", "here/script.py"], "compress: 'tensor': must be AXIS=CODEC or"),
        (["--compress", "a=int8h", "a=int4h", "--", "here/script.py"], "compress: 'a=int4h': a is given twice"),
        (["--compress", "a=int8h", "--require", "95", "--", "here/script.py"], "require=95: must be a share from 0"),
        (["--compress", "a=int8h", "--min-bytes", "-1", "--", "here/script.py"], "min_bytes=-1: must be an integer"),
        (["--compress", "a=int8h", "--report", "no/such/file", "--", "here/script.py"], "report=no/such/file: must be"),
        (["--compress", "tensor=int8h", "here/script.py"], "no program; give the program after --, such as:"),
        (["here/script.py"], "no program; give the program after --, such as:"),
        (["--compress", "a=int8h", "--compress", "a=int4h", "--", "here/script.py"], "compress: 'a=int4h': a is given"),
        (["--compress", "a=int8h", "--", "here"], "here: is a folder; give the program after --"),
        (["--compress", "a=int8h", "--", "-m", "here"], "-m here: is a package without a __main__; name one"),
        (["--compress", "a=int8h", "--", "-m", "here.needs.train"], "-m here.needs.train: its package cannot be "
                                                                   "imported: No module named 'not_there'; install"),
        (["--compress", "a=int8h", "--", "-m", ".here"], "-m .here: must be the name of a module; give the program"),
        (["--compress", "a=int8h", "--", "-m", "here/script.py"], "-m here/script.py: must be the name of a module"),
        (["--comprss", "a=int8h", "--", "here/script.py"], "unknown option --comprss; did you mean --compress?"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_exit_code_2(args, line, tmp_path, monkeypatch, capsys):
    from taco_jax.dropin.command import run

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "script.py").write_text("raise AssertionError")
    (tmp_path / "here" / "needs").mkdir()
    (tmp_path / "here" / "needs" / "__init__.py").write_text("import not_there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(args) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
