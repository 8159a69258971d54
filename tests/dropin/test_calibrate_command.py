"""`run --calibrate`: scripts that are measured, several processes, and what is refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import REPOSITORY, cpu_environment, run_python
from meetings import free_port

from taco_jax.compression import plan_file

pytestmark = pytest.mark.usefixtures("nothing_stays_in_force")


PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
random = lambda key, shape: jax.random.normal(jax.random.key(key), shape)
put = lambda key, shape, *spec: jax.device_put(random(key, shape), NamedSharding(mesh, P(*spec)))
x, w = put(0, (256, 1024), None, "tensor"), put(1, (1024, 512), "tensor")
f = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P()))
for _ in range(6):
    y = f(x, w)
print("sum", float(y.sum()).hex(), float((y * y).sum()).hex(), sys.argv[1:])
if "fails" in sys.argv:
    raise SystemExit(7)
"""


def test_a_script_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text(PROGRAM)
    run = lambda *args, **options: run_python(args, devices=4, cwd=tmp_path, **options)
    monkeypatch.setattr(sys, "argv", ["script.py", "a"])
    exec(PROGRAM, {})  # what a process of its own prints too
    exact = capsys.readouterr().out
    command = (
        "-m",
        "taco_jax.run",
        "--calibrate",
        "plan.json",
        "--snr",
        "30",
        "--axes",
        "tensor",
        "--calibrate-steps",
        "2",
    )
    measured = run(*command, "--", "script.py", "a")
    assert measured.stdout == exact
    head, row, last = measured.stderr.splitlines()[-3:]
    assert head.split()[:3] == ["elements", "calls", "share"] and head.endswith("operation, op_name")
    assert row.split()[:4] == ["131,072", "6", "100.0%", "int8h"] and "all_reduce jit(matmul)/" in row
    assert "(budget: 30 dB)" in last and last.endswith("4 of 4 devices measured")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["made"]["command"].startswith("python -m taco_jax.run --calibrate plan.json --snr 30")
    assert [(line["axis"], line["codec"]) for line in plan["collectives"]] == [("tensor", "int8h")]


@pytest.mark.slow
def test_a_program_from_the_persistent_cache_is_measured(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_LOG_COMPILES": "1",
    }  # fmt: skip
    run = lambda *args: run_python([*args, "script.py"], devices=4, cwd=tmp_path, env=environment)
    command = ("-m", "taco_jax.run", "--calibrate", "plan.json", "--")
    exact, first, second = run(), run(*command), run(*command)
    assert exact.stdout == first.stdout == second.stdout
    hit = "Persistent compilation cache hit for 'jit_matmul'"
    assert [hit in result.stderr for result in (exact, first, second)] == [False, False, True]
    assert first.stderr.splitlines()[-2:] == second.stderr.splitlines()[-2:]


@pytest.mark.slow
def test_two_processes(tmp_path, capsys):
    """Each measures its own devices; the file is the first's. A plan says the same in both."""
    import calibrate_process

    port, path = free_port(), tmp_path / "plan.json"
    support = REPOSITORY / "tests" / "support"
    environment = os.environ | cpu_environment(devices=4)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (REPOSITORY, support)))
    command = lambda n: [sys.executable, support / "calibrate_process.py", *map(str, (port, n, 2, path))]
    running = [
        subprocess.Popen(command(n), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    found = [json.loads(out.partition("JSON ")[2]) for out, _ in outputs if "JSON " in out]
    assert len(found) == 2, outputs
    assert "on 4 of 8 devices" in plan_file.read(path).made["data"]
    calibrate_process.main(0, 0, 1, str(tmp_path / "alone.json"))
    alone = json.loads(capsys.readouterr().out.partition("JSON ")[2])
    for each in found:
        assert [row[:4] for row in each["rows"]] == [row[:4] for row in alone["rows"]]
        np.testing.assert_allclose(each["figures"], alone["figures"], rtol=0.3)
        assert each["codecs"] == found[0]["codecs"]


@pytest.mark.slow
def test_a_program_that_fails_or_has_no_collectives(tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    (tmp_path / "alone.py").write_text("import jax; print(jax.jit(lambda x: x + 1)(1))")
    run = lambda *args, **options: run_python(
        ["-m", "taco_jax.run", "--calibrate", "plan.json", *args], devices=4, cwd=tmp_path, **options
    )
    assert "(budget: 4.5 bits)" in run("--", "script.py", "fails", check=7).stderr
    command = ["-m", "taco_jax.run", "--compress", "plan.json", "--require", "1", "--", "script.py"]
    assert "int4h    tensor" in run_python(command, devices=4, cwd=tmp_path).stderr
    last = run("--", "alone.py", check=1).stderr.splitlines()[-1]
    assert last.startswith("error: nothing was measured: no program with collectives was compiled")
    last = run("--axes", "tensr", "--", "script.py", check=1).stderr.splitlines()[-1]
    assert last == "error: nothing was measured: its axis or operation is not measured; the axes are tensor"


@pytest.mark.parametrize(
    "args,line",
    [
        (["--calibrate", "plan.json", "--compress", "a=int8h"], "compress: with --calibrate the program runs exactly"),
        (["--calibrate", "plan.json", "--require", "0.5"], "require: with --calibrate the program runs exactly; leave"),
        (["--calibrate", "plan.txt"], "calibrate=plan.txt: must be the path of a plan file, such as plan.json"),
        (["--calibrate", "no/such/plan.json"], "calibrate=no/such/plan.json: must be a file in a folder that exists"),
        (["--calibrate", "plan.json", "--bits", "3"], "bits=3: the codecs that are tried need 4.125 at least (int4h)"),
        (["--calibrate", "plan.json", "--axes", "a,b/c"], "axes: 'b/c': 'c' is no operation; "),
        (
            ["--bits", "5", "--compress", "a=int8h"],
            "bits: is an option of --calibrate plan.json, which measures",
        ),
        (["--calibrate-steps", "5", "--compress", "a=int8h"], "calibrate-steps: is an option of --calibrate plan.json"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(args, line, tmp_path, monkeypatch, capsys):
    from taco_jax.dropin.command import run

    (tmp_path / "script.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    assert run([*args, "--", "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {line}") and error.count("\n") == 1
