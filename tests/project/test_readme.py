"""Every `python` block of the README and of docs/ runs; results say where they come from.

A block marked `py` needs what the tests do not have, and a comment before it says what. `test_documents.py` has what
needs no process.
"""

import re
import subprocess

import pytest
from documents import PAGES, blocks
from helpers import REPOSITORY

BLOCKS = [(page.name, code) for page in PAGES for code in blocks(page, "python")]


def test_there_is_something_to_test():
    assert [name for name, _ in BLOCKS] == ["README.md", "drop-in.md", *["layers.md"] * 4]
    (quickstart, *_) = blocks(PAGES[0], "bash")
    assert "pip install . && " in quickstart
    assert "python -m taco_jax.train --config experiments/quickstart.py" in quickstart


def test_ci_finds_the_test_command():
    script = f"cd '{REPOSITORY}' && source .ci/common.sh && test_command"
    command = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert command in blocks(PAGES[0], "bash") and "-m pytest -n 2 --dist loadfile" in command


# As of other tests, the twin in Linen is the night's.
NIGHTLY = [number for number, (_, code) in enumerate(BLOCKS) if "taco_jax.linen" in code]


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n in NIGHTLY)) for n in range(len(BLOCKS))]
)
def test_python_block_runs(number, run_python):
    _, code = BLOCKS[number]
    result = run_python(code, devices=8)
    assert "nan" not in result.stdout.lower()
    if "StandardCheckpointer" in code:  # which compares by itself
        assert re.findall(r"'tp': (\d)", result.stdout) == ["4", "2"]
    elif "adam" in code:
        losses = [float(line.split()[1]) for line in result.stdout.splitlines()]
        assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    elif "taco_jax.compressed" in code:
        *report, error = result.stdout.splitlines()
        assert re.fullmatch(r"relative error of the gradient: 0\.0[0-3]\d", error) and float(error[-5:]) > 0
        assert re.fullmatch(r"tensor: [\d,]+ bytes before, [\d,]+ after, 3\.\d\d times fewer", report[-2])
    else:
        assert re.fullmatch(r"relative error of the compressed sum: 0\.0\d\d\n", result.stdout)


def test_every_result_is_in_the_index_and_says_where_it_comes_from():
    results = REPOSITORY / "experiments" / "results"
    index = (results / "README.md").read_text()
    folders = sorted(path.name for path in results.iterdir() if path.is_dir())
    assert folders and all(f"({name}/README.md)" in index for name in folders)
    for name in folders:
        text = (results / name / "README.md").read_text()
        assert all(f"* {field}: " in text for field in ("date", "hardware", "commit", "command")), name
