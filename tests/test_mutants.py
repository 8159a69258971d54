"""The seeded faults have their places in the code, the README lists them, and only a failed test counts as a kill."""

import dataclasses
import subprocess
import sys

import mutants
import pytest
from faults import KINDS, MUTANTS, Mutant
from helpers import REPOSITORY

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


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"old": "y = 1"}, "occurs 0 times in code.py"),
        ({"old": "1\nx"}, "occurs 0 times"),
        ({"file": "gone.py"}, "gone.py does not exist"),
        ({"new": "x = 1"}, "changes nothing"),
        ({"tests": ()}, "must be files of tests that exist"),
        ({"tests": ("tests/test_gone.py::test_x",)}, "['tests/test_gone.py']"),
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
    assert runner.baseline([FAULT]) == {}
    verdicts = {verdict.name: verdict for verdict in runner.run([FAULT, living], {})}
    assert verdicts["a-fault"].outcome == mutants.KILLED
    assert verdicts["a-fault"].by == "tests/test_code.py::test_one"
    assert verdicts["living"].outcome == mutants.LIVED
    assert (tmp_path / "code.py").read_text() == "x = 1\ny = 1\n"
    (unfit,) = runner.run([FAULT], {FAULT.tests[0]: "fails"})
    assert (unfit.outcome, unfit.detail) == (mutants.BROKEN, f"without the fault, {FAULT.tests[0]}: fails")


@pytest.mark.parametrize(
    "arguments,said",
    [
        (["--only", "top_p"], "error: --only top_p: no such fault; did you mean 'top-p'?"),
        (["--jobs", "0"], "error: --jobs 0: must be at least 1"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, said):
    command = [sys.executable, REPOSITORY / "tests" / "mutants.py", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
