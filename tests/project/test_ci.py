"""The scripts in .ci: steps that fail, end by their limit or are stopped say so; wrong arguments are one line.

What the scripts run is not run here.
"""

import os
import signal
import subprocess
import sys

import pytest
from helpers import REPOSITORY, until

HEAD = f"set -euo pipefail; cd '{REPOSITORY}'; source .ci/common.sh; begin; "


@pytest.fixture
def bash(tmp_path):
    """bash(script): what a script that has sourced .ci/common.sh prints, as a finished process."""

    def run(script, arguments=("-c",)):
        command = ["bash", *arguments, script]
        return subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=60)

    return run


def environment(tmp_path, **more):
    folder = tmp_path / "with space"
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("TACO_CI_PYTHON", "TACO_TEST_WORKERS")}
    return kept | {"TMPDIR": str(folder)} | more


def test_every_step_runs_and_says_how_it_ended(bash, tmp_path):
    steps = {
        "silent": "limited 50 true",
        "fails": "limited 50 bash -c 'exit 3'",
        "stops at an error": "false; echo went on",
        "slow": "limited 1 sleep 50",
        "piped": "limited 1 bash -c 'echo began; sleep 50' | tee \"$work/log\"",
        "ends well when told to": "limited 1 bash -c 'trap \"exit 0\" TERM; sleep 50 & wait'",
        "is killed": "limited 50 bash -c 'kill -9 $$'",
        "misspelt": "limited 50 no_such_command",
        "last": "echo the last",
    }
    functions = "".join(f"f{i}() {{ {body}; }}\n" for i, body in enumerate(steps.values()))
    result = bash(HEAD + functions + "".join(f"step '{name}' f{i}\n" for i, name in enumerate(steps)) + "finish none")
    said = [line.partition(" (")[0] for line in result.stdout.splitlines() if line.startswith("===") and " (" in line]
    late = "FAILED, ended by its limit of time"
    assert said == [
        "=== silent: ok",
        "=== fails: FAILED with status 3",
        "=== stops at an error: FAILED with status 1",
        f"=== slow: {late}",
        f"=== piped: {late}",
        f"=== ends well when told to: {late}",
        "=== is killed: FAILED with status 137",
        "=== misspelt: FAILED with status 127",
        "=== last: ok",
    ]
    assert "went on" not in result.stdout and "began" in result.stdout
    assert "!!! ended by the limit of 1 s: sleep 50" in result.stderr
    assert "[slow: ended by its limit of time]" in result.stdout.splitlines()[-1]
    assert result.returncode == 1
    assert not list((tmp_path / "with space").iterdir())


def test_commands_do_not_ignore_ctrl_c(bash):
    is_default = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    script = f"step limited limited 50 '{sys.executable}' -c '{is_default}'; finish none"
    assert bash(HEAD + script).returncode == 0


@pytest.mark.parametrize(
    "number,group,body",
    [
        (signal.SIGINT, True, "limited 500 bash -c 'touch begun; sleep 500; echo x' | cat"),
        (signal.SIGTERM, False, "limited 500 bash -c 'touch begun; sleep 500; echo x' | cat"),
        (signal.SIGTERM, False, "bash -c 'touch begun; sleep 500; echo x'"),
    ],
)
def test_a_signal_ends_all_that_was_started(number, group, body, tmp_path):
    def working():
        found = []
        for process in os.listdir("/proc"):
            try:
                found += [process] * (process.isdigit() and os.readlink(f"/proc/{process}/cwd") == str(tmp_path))
            except OSError:
                pass
        return found

    script = HEAD + f"cd '{tmp_path}'; f() {{ {body}; }}; step long f; step next echo the next; finish none"
    process = subprocess.Popen(
        ["bash", "-c", script], env=environment(tmp_path), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until((tmp_path / "begun").exists, "the step's command")
        os.killpg(process.pid, number) if group else os.kill(process.pid, number)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert f"!!! stopped by {signal.Signals(number).name}" in stderr and "the next" not in stdout
    assert not working() and not list((tmp_path / "with space").iterdir())


@pytest.mark.parametrize(
    "script,arguments,variables,said",
    [
        ("nightly", ["slwo"], {}, "error: slwo: neither parts (of slow,mosaic,fast,mutants"),
        ("nightly", ["slow,mutant"], {}, "error: slow,mutant: neither parts"),
        ("nightly", [""], {}, "error: : neither parts"),
        ("nightly", ["slow,mutants", "-k", "x"], {}, "error: -k x: mutants and pytest take other arguments"),
        (
            "nightly",
            ["slow"],
            {"TACO_CI_PYTHON": "/gone/python"},
            "error: TACO_CI_PYTHON=/gone/python: must be a Python",
        ),
        (
            "nightly",
            ["slow"],
            {"TACO_CI_PYTHON": "./bin/python"},
            "error: TACO_CI_PYTHON=./bin/python: must be a Python",
        ),
        ("nightly", ["slow"], {"TACO_TEST_WORKERS": "0"}, "error: TACO_TEST_WORKERS=0: must be a whole number"),
        ("nightly", ["slow"], {"TACO_TEST_WORKERS": "many"}, "error: TACO_TEST_WORKERS=many: must be a whole number"),
        ("run", ["fast"], {}, "error: fast: .ci/run takes no arguments"),
        ("aot", ["cuda11"], {}, "error: cuda11: neither cuda12 or cuda13"),
        (
            "dropin",
            ["tunix", "maxtxt"],
            {},
            "error: maxtxt: no program of .ci/dropin, which are tunix, gemma and t5gemma",
        ),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(script, arguments, variables, said, tmp_path):
    command = [REPOSITORY / ".ci" / script, *arguments]
    result = subprocess.run(
        command, env=environment(tmp_path, **variables), cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    assert not list((tmp_path / "with space").iterdir())


def test_a_folder_without_git_is_refused(bash, tmp_path):
    result = bash(HEAD + f"cd '{tmp_path}'; GIT_CEILING_DIRECTORIES='{tmp_path.parent}' checkout copy")
    assert (result.returncode, result.stderr) == (
        2,
        f"error: {tmp_path} is no git checkout, whose files are to be tested\n",
    )
    assert not (tmp_path / "copy").exists()


def test_help_is_the_head_of_the_script(bash):
    result = bash("--help", [REPOSITORY / ".ci" / "nightly"])
    assert (
        result.returncode == 0 and "TACO_CI_PYTHON=/path/to/python" in result.stdout and "set -e" not in result.stdout
    )
