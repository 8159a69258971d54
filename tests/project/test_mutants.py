"""The seeded faults have their places in the code, the README lists them, and only a failed test counts as a kill."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from faults import KINDS, MUTANTS, Mutant
from helpers import REPOSITORY, until

FAULT = Mutant("a-fault", "one becomes two", "code.py", "x = 1", "x = 2", ("tests/test_code.py -k one",))


@pytest.fixture
def tree(tmp_path):
    """A project of one line of code."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "tests" / "test_code.py").touch()
    return tmp_path


def test_every_fault_has_its_place():
    assert not mutants.check(MUTANTS)


def test_there_are_faults_of_every_kind():
    assert len(MUTANTS) >= 150
    assert min(map(len, KINDS.values())) >= 20


def test_the_readme_lists_them():
    text = (REPOSITORY / mutants.README).read_text()
    assert text == mutants.in_readme(text), "run: python tests/mutants.py --readme"


def test_a_fault_is_applied_once(tree):
    assert FAULT.problem(tree) is None
    FAULT.apply(tree)
    assert (tree / "code.py").read_text() == "x = 2\n"
    assert "occurs 0 times in code.py, must be once: 'x = 1'" in FAULT.problem(tree)
    with pytest.raises(ValueError, match="occurs 0 times"):
        FAULT.apply(tree)


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"old": "y = 1"}, "occurs 0 times in code.py"),
        ({"old": "1\nx"}, "occurs 0 times"),
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"new": "x = 1"}, "changes nothing"),
        ({"tests": ()}, "must be files of tests that exist"),
        ({"tests": ("tests/test_gone.py::test_x",)}, "['tests/test_gone.py']"),
        ({"tests": ("tests/test_code.py -k 'one",)}, "No closing quotation"),
        ({"tests": ("tests/test_code.py -k one or two",)}, "must be FILE or FILE -k EXPRESSION"),
        ({"tests": ("tests/test_code.py -m slow",)}, "must be FILE or FILE -k EXPRESSION"),
    ],
)
def test_what_cannot_be_applied(tree, changes, said):
    assert said in dataclasses.replace(FAULT, **changes).problem(tree)


def test_a_place_that_occurs_twice(tree):
    (tree / "code.py").write_text("x = 1\nx = 1\n")
    assert "occurs 2 times" in FAULT.problem(tree)


def test_names_are_unique(tree):
    assert mutants.check([FAULT, FAULT], tree) == ["a-fault: the name of more than one fault"]


@pytest.mark.parametrize(
    "code,output,outcome,by",
    [
        (
            1,
            "F\nFAILED tests/test_a.py::test_b[x - y] - assert 1 == 2\n1 failed in 1s",
            mutants.KILLED,
            "tests/test_a.py",
        ),
        (1, "FAILED tests/test_a.py::test_b - NameError: name 'q' is not defined\n1 failed", mutants.BROKEN, "tests"),
        (1, "ERROR tests/test_a.py::test_b - a fixture\n1 error in 1s", mutants.BROKEN, ""),
        (1, "+++ Timeout +++", mutants.BROKEN, ""),
        (0, "..\n2 passed, 3 skipped in 1s", mutants.LIVED, ""),
        (0, "ss\n2 skipped in 1s", mutants.BROKEN, ""),
        (5, "no tests ran in 1s", mutants.BROKEN, ""),
        (2, "ERROR tests/test_a.py - SyntaxError\n1 error in 1s", mutants.BROKEN, ""),
        (4, "ERROR: file or directory not found: tests/gone.py", mutants.BROKEN, ""),
        (-6, "Fatal Python error: Aborted", mutants.BROKEN, ""),
    ],
)
def test_only_a_failed_test_is_a_kill(code, output, outcome, by):
    verdict = mutants.judge(code, output)
    assert verdict.outcome == outcome
    assert verdict.by.startswith(by) and (verdict.detail or outcome == mutants.LIVED)


def test_a_kill_by_a_limit_says_so(capsys):
    test, reason = "tests/test_a.py::test_b", "AssertionError: limit of 120 s: waited for process 0"
    for detail in (reason, "assert 1 == 2"):
        verdict = mutants.judge(1, f"FAILED {test} - {detail}\n1 failed in 1s")
        mutants._say(dataclasses.replace(verdict, name=MUTANTS[0].name))
    late, other = capsys.readouterr().out.splitlines()
    assert late.startswith("killed") and late.endswith(f"{test} {reason}")
    assert other.startswith("killed") and other.endswith(test)


def test_files_run_together_and_selections_by_themselves():
    entries = ["tests/a.py", "tests/b.py", "tests/c.py -k 'd or e'", "tests"]
    assert list(mutants._together(entries)) == [
        ["tests/a.py", "tests/b.py"], ["tests/c.py", "-k", "d or e"], ["tests"],
    ]  # fmt: skip


def test_the_files_of_a_tree_without_git(tree, monkeypatch):
    for made in ("build/code.py", ".venv312/x.py", "a.egg-info/SOURCES.txt", "tests/__pycache__/x.pyc"):
        (tree / made).parent.mkdir(parents=True)
        (tree / made).touch()
    (tree / ".gitignore").touch()
    monkeypatch.setattr(mutants, "REPOSITORY", tree)
    assert sorted(mutants._files()) == [".gitignore", "code.py", "tests/test_code.py"]


def test_a_killed_and_a_living_fault(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("x = 1\ny = 1\n")
    (tmp_path / "tests" / "test_code.py").write_text("from code import x\n\n\ndef test_one():\n    assert x == 1\n")
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-ra"\nmarkers = ["slow"]\n')
    (tmp_path / "tests" / "conftest.py").write_text("import sys\n\nsys.modules.pop('code', None)\n")
    monkeypatch.setattr(mutants, "REPOSITORY", tmp_path)
    living = dataclasses.replace(FAULT, name="living", old="y = 1", new="y = 2")
    runner = mutants.Runner(tmp_path / "pool", jobs=2, timeout=60, whole_suite=False)
    (tmp_path / "code.py").write_text("z = 0\n")  # whoever goes on working does not disturb the run
    assert runner.baseline([FAULT]) == {}
    verdicts = {verdict.name: verdict for verdict in runner.run([FAULT, living], {})}
    assert verdicts["a-fault"].outcome == mutants.KILLED
    assert verdicts["a-fault"].by == "tests/test_code.py::test_one"
    assert verdicts["living"].outcome == mutants.LIVED
    assert (tmp_path / "code.py").read_text() == "z = 0\n"
    (unfit,) = runner.run([FAULT], {FAULT.tests[0]: "fails"})
    assert (unfit.outcome, unfit.detail) == (mutants.BROKEN, f"without the fault, {FAULT.tests[0]}: fails")


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--only", "top_p"], "error: --only top_p: no such fault; did you mean 'top-p'?"),
        (["--jobs", "0"], "error: --jobs 0: must be at least 1"),
        (["--timeout", "-5"], "error: --timeout -5: must be a finite number of seconds above 0"),
        (["--timeout", "nan"], "error: --timeout nan: must be a finite number of seconds above 0"),
        (["--only", "top-p", "--out", "gone/out.json"], "error: --out gone/out.json: cannot be written: No such file"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said):
    command = [sys.executable, REPOSITORY / "tests" / "mutants.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1


def test_sigterm_ends_all_that_was_started(tmp_path):
    def started():
        """The processes that work in a copy."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "cwd").startswith(str(temporary)):
                    found.append(process.name)
        return found

    temporary = tmp_path / "with space"
    temporary.mkdir()
    out = tmp_path / "out.json"
    command = [sys.executable, REPOSITORY / "tests" / "mutants.py", "--only", "top-p", "scheduler-twice", "--out", out]
    environment = os.environ | {"TMPDIR": str(temporary), "TACO_TEST_GPU": "0"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(started, "a copy that is tested")
        process.terminate()
        assert process.communicate(timeout=60)[1] == "error: stopped by SIGTERM\n"
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert not started() and not list(temporary.iterdir())
    assert [verdict["name"] for verdict in json.loads(out.read_text())] == ["scheduler-twice"]


def selects(expression, name):
    """Whether `-k expression` selects a test, by parts of its name as pytest does."""
    word = lambda match: match[0] if match[0] in ("and", "or", "not") else str(match[0].lower() in name.lower())
    return eval(re.sub(r"[^\s()]+", word, expression))


def test_every_selection_has_tests(request):
    """Of the files that were collected beside this one: all of them, where the whole suite runs."""
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests of each file were collected")
    collected = {}
    for item in request.session.items:
        name = item.path.name + item.nodeid.partition("::")[2]
        collected.setdefault(item.path.relative_to(REPOSITORY).as_posix(), []).append(name)
    for mutant in MUTANTS:
        for file, *selected in map(shlex.split, mutant.tests):
            if selected and file in collected:
                found = [name for name in collected[file] if selects(selected[1], name)]
                assert found, f"{mutant.name}: {file} has no test that -k {selected[1]!r} selects"


def test_selections_are_read_as_pytest_reads_them():
    name = "test_codec.py::TestX::test_snr[taco-1]"
    assert all(selects(expression, name) for expression in ("snr", "TACO", "not wire", "(wire or snr) and testx"))
    assert not any(selects(expression, name) for expression in ("wire", "not snr", "snr and wire"))
