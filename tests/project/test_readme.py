"""The README keeps its promises: its Python runs, its files exist, its numbers come from experiments/results/.

A number in the README is a link to where it comes from, a JSON file and the dotted key in it, rounded as shown:
`[1.71](experiments/results/quickstart/summary.json "taco.loss")`; with a percent sign the value is a fraction. Decimal
numbers elsewhere are errors, versions and code apart.
"""

import json
import re

import pytest
from helpers import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
TEXT = re.sub(r"<!--.*?-->", "", README, flags=re.S)
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.S)
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
LINKS = re.findall(r"\[([^\]]*)\]\(([^)\s]+)(?:\s+\"([^\"]*)\")?\)", PROSE)


def quoted_numbers():
    return [(text, path, key) for text, path, key in LINKS if path.endswith(".json")]


def test_there_is_something_to_test():
    assert BLOCKS
    assert "python -m taco_jax.train --config experiments/quickstart.py" in README
    assert "python -m pytest" in README


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_block_runs(number, run_python):
    result = run_python(BLOCKS[number], devices=8)
    assert "nan" not in result.stdout.lower()
    if "CompressedDense" in BLOCKS[number]:
        losses = [float(line.split()[1]) for line in result.stdout.splitlines()]
        assert len(losses) == 3 and losses[0] > losses[1] > losses[2]


def test_links_and_pictures_exist():
    missing = [path for _, path, _ in LINKS if "://" not in path and not (REPOSITORY / path.split("#")[0]).exists()]
    assert not missing, f"the README links to files that are not there: {missing}"


def test_files_of_the_tour_exist():
    tour = re.search(r"## A tour of the files\n(.*?)\n## ", PROSE, flags=re.S)[1]
    rows = [line.split("|")[1] for line in tour.splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 20
    missing = [path for path in paths if not (REPOSITORY / path).exists()]
    assert not missing, f"the README's tour names files that are not there: {missing}"


def test_numbers_come_from_results():
    for text, path, key in quoted_numbers():
        value = json.loads((REPOSITORY / path).read_text())
        for part in key.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        shown = re.search(r"-?\d[\d,]*(?:\.(\d+))?", text)
        assert shown, f"[{text}]({path}) shows no number"
        scale = 100 if "%" in text else 1
        digits = len(shown[1] or "")
        assert f"{value * scale:.{digits}f}" == shown[0].replace(",", ""), f"README says {text}, {path} says {value}"


def test_no_number_without_a_source():
    prose = re.sub(r"\[[^\]]*\]\([^)]*\)", "", PROSE)  # links carry their own source
    prose = re.sub(r"`[^`]*`", "", prose)  # code
    versions = r"(python|jax|apache|arxiv|version|capability)[\s-]*\d+(\.\d+)+((,| and| to| or) \d+(\.\d+)+)*"
    prose = re.sub(versions, "", prose, flags=re.I)
    loose = re.findall(r"\d+\.\d+", prose)
    assert not loose, f"numbers without a source in the README: {loose}"


def test_every_result_is_in_the_index_and_says_where_it_comes_from():
    results = REPOSITORY / "experiments" / "results"
    index = (results / "README.md").read_text()
    folders = sorted(path.name for path in results.iterdir() if path.is_dir())
    assert folders and all(f"({name}/README.md)" in index for name in folders)
    for name in folders:
        text = (results / name / "README.md").read_text()
        assert all(f"* {field}: " in text for field in ("date", "hardware", "commit", "command")), name
