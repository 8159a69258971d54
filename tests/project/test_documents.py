"""README.md and docs/: what they name exists, figures are those of experiments/results, the README stays short."""

import importlib.util
import json
import re
import shutil
import tomllib

import pytest
from documents import PAGES, anchors, blocks, links, paths, prose, text
from helpers import REPOSITORY

import taco_jax
import taco_jax.linen
import taco_jax.tensor_parallel

README = PAGES[0]
RECOMMENDED = "taco_jax/compression/recommended.json"
LONGEST_README, MOST_FIGURES = 150, 10
PYTHON = r"python -m ([\w.]+)"


@pytest.fixture(scope="module")
def tables():
    """experiments/tables.py as a module."""
    spec = importlib.util.spec_from_file_location("tables", REPOSITORY / "experiments" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path):
    """A repository of the documents and of the results that they quote."""
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        shutil.copy(page, tmp_path / page.relative_to(REPOSITORY))
    (tmp_path / RECOMMENDED).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / RECOMMENDED, tmp_path / RECOMMENDED)
    for summary in (REPOSITORY / "experiments/results").glob("*/summary.json"):
        folder = tmp_path / summary.parent.relative_to(REPOSITORY)
        folder.mkdir(parents=True)
        shutil.copy(summary, folder)
    return tmp_path


def in_page(page):
    return page.relative_to(REPOSITORY).as_posix()


# Paths and links


@pytest.mark.parametrize("page", PAGES, ids=in_page)
def test_paths_and_modules_exist(page):
    named = paths(page)
    missing = [path for path in named if not (REPOSITORY / path).exists()]
    assert not missing, f"{in_page(page)} names files that are not there: {missing}"
    modules = {name for name in re.findall(PYTHON, text(page)) if name.startswith(("taco_jax", "pallas_kernels"))}
    assert all(importlib.util.find_spec(name) for name in modules)


@pytest.mark.parametrize("page", PAGES, ids=in_page)
def test_extras_exist_and_are_installed_from_the_clone(page):
    """The package is in no index, so that only '.[extra]' works in an environment that does not have it yet."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"'([\w-]*\.?)\[([\w,-]+)\]'", text(page))
    assert [where for where, _ in named if where != "."] == []
    assert {extra for _, several in named for extra in several.split(",")} <= set(extras)


@pytest.mark.parametrize("page", PAGES, ids=in_page)
def test_links_lead_somewhere(page):
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{in_page(page)}: {link} is not there"
        assert not anchor or anchor in anchors(target) or target.name == "api.md", f"{in_page(page)}: no heading {link}"


def test_broken_names_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`taco_jax/gone.py`, experiments/gone.py.\n\n```bash\npython docs/gone.py\n```\n"
        "`experiments/*.py` [a `b`](c.md#d) `[no](link)`\n\n## A head: (1)\n<!-- docs/x.md -->\n"
    )
    assert paths(page) == ["taco_jax/gone.py", "experiments/gone.py", "docs/gone.py"]
    assert links(page) == ["c.md#d"] and anchors(page) == {"a-head-1"}


def test_every_page_is_in_the_navigation_and_in_the_readme():
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("nav:")[2]
    for page in PAGES[1:]:
        assert f": {page.name}\n" in navigation, page.name
        assert f"(docs/{page.name})" in README.read_text(), page.name


# The README's limits


def test_the_readme_is_short():
    readme = README.read_text()
    assert readme.count("\n") <= LONGEST_README
    assert not [link for link in links(README) if ".json" in link] and "summary.json" not in readme
    (example,) = blocks(README, "python")
    assert example.count("\n") <= 12
    head = readme.partition("\n## ")[0].split("\n", 1)[1]
    assert len(re.findall(r"\.(?=\s)", head)) == 3 and head.count("https://arxiv.org/abs/") == 2


def test_the_readme_has_few_figures(tables):
    names = re.findall(r"<!-- table: (\S+) -->", README.read_text())
    assert names == ["headline", "recommended-short"] and not tables.FIGURE.search(README.read_text())
    cells = [cell for row in list(tables.headline(tables.Figures(REPOSITORY)))[1:] for cell in row[1:] if cell]
    assert 0 < len(cells) <= MOST_FIGURES


# Figures


def test_figures_are_those_of_the_results(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().out


def test_ratios_against_published_sums_are_of_times(tables):
    """Another way than the table's: the time that a sum of the published bandwidth takes, over the codec's own."""
    rows = {(row[0], row[1], row[3]): row[5:] for row in list(tables.against_published(tables.Figures(REPOSITORY)))[1:]}
    for (gpus, size, codec), cells in rows.items():
        ranks, elements = int(gpus), int(size[:-1]) << 20
        summary = REPOSITORY / "experiments" / "results" / f"allreduce_{gpus}gpus" / "summary.json"
        us = json.loads(summary.read_text())[str(elements >> 10)][codec.strip("`")]["us"]
        for cell, gb_s in zip(cells, (tables.RING_GB_S, tables.NVLS_GB_S)):
            exact_us = 2 * (ranks - 1) / ranks * 2 * elements / gb_s / 1e3
            assert abs(float(cell[:-1]) - exact_us / us) <= 0.0051
    assert len(rows) == 12


def test_every_table_stands_in_one_page(tables):
    used = [name for page in PAGES for name in re.findall(r"<!-- table: (\S+) -->", page.read_text())]
    assert sorted(used) == sorted(tables.TABLES)


# experiments/accuracy.py writes accuracy.md, and tests/test_accuracy.py compares it with its runs.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "accuracy.md"], ids=in_page)
def test_no_figure_without_a_source(page, tables):
    """Decimal numbers stand in tables and figures of tables.py; versions, code and equations apart."""
    assert not loose_figures(page.read_text(), tables), f"figures without a source in {in_page(page)}"


def loose_figures(page_text, tables):
    rest = re.sub(r"<!-- table: .*?<!-- end of table -->", "", page_text, flags=re.S)
    rest = re.sub(r"```.*?```", "", rest, flags=re.S)
    rest = re.sub(r"<!--.*?-->", "", tables.FIGURE.sub("", rest), flags=re.S)
    rest = re.sub(r"`[^`]*`|\]\([^)]*\)", "", rest)
    versions = r"(python|jax|apache|arxiv|version|capability)[\s-]*\d+(\.\d+)+((,| and| to| or) \d+(\.\d+)+)*"
    return re.findall(r"\d+\.\d+", re.sub(versions, "", rest, flags=re.I))


def test_a_loose_figure_is_found(tables):
    text = "1.71x, 2.5<!-- psum: a.b --> and `3.5`, jax 0.11, Python 3.11, 3.12 or 3.13"
    assert loose_figures(text, tables) == ["1.71"]


def change(root, folder, key, value):
    file = root / "experiments/results" / folder / "summary.json"
    summary = part = json.loads(file.read_text())
    *leading, last = key.split(".")
    for name in leading:
        part = part[name]
    part[last] = value
    file.write_text(json.dumps(summary))


@pytest.mark.parametrize(
    "folder,key,page,old,new",
    [
        ("qwen7b_tp4_kernels", "host.taco.speedup", "README.md", "| 1.52x |", "| 1.81x |"),
        ("perplexity_smollm2", "int4h.change", "docs/inference.md", "| 30.6 % |", "| 181.0 % |"),
        ("quickstart", "int8h.ratio", "docs/benchmarks.md", "takes, sends 1.94<", "takes, sends 1.81<"),
        ("perplexity_smollm2", "mxint8.change", "docs/inference.md", "0.4 %<!--", "181.0 %<!--"),  # its decimals stay
    ],
)
def test_a_changed_result_is_noticed(folder, key, page, old, new, copy, tables, capsys):
    before = (copy / page).read_text()
    assert tables.main(["--check", "--root", str(copy)]) == 0 and old in before
    change(copy, folder, key, 1.81)
    assert tables.main(["--check", "--root", str(copy)]) == 1
    assert f"{page} is not what the results say" in capsys.readouterr().out and (copy / page).read_text() == before
    assert tables.main(["--root", str(copy)]) == 0
    assert new in (copy / page).read_text()
    assert tables.main(["--check", "--root", str(copy)]) == 0


def test_another_recommendation_is_noticed(copy, tables, capsys):
    file = copy / RECOMMENDED
    content = json.loads(file.read_text())
    content["weights"] |= {"forward": "int4h", "backward": "int4h", "bits": 4.125}
    file.write_text(json.dumps(content))
    assert tables.main(["--check", "--root", str(copy)]) == 1
    assert capsys.readouterr().out.count("is not what the results say") == 2  # README.md and docs/codecs.md
    assert tables.main(["--root", str(copy)]) == 0
    assert "| training: weights that ZeRO-1 sends back | `int4h` | about 1/4 |" in (copy / "README.md").read_text()
    file.unlink()
    assert tables.main(["--root", str(copy)]) == 2
    assert "recommended.json: cannot be read (FileNotFoundError)" in capsys.readouterr().err


def test_a_table_changed_by_hand_is_noticed(copy, tables, capsys):
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("| 1.52x |", "| 1.53x |"))
    assert tables.main(["--check", "--root", str(copy)]) == 1
    assert capsys.readouterr().out.startswith("README.md is not what the results say: python experiments/tables.py")


@pytest.mark.parametrize(
    "wrong,said",
    [
        (
            "<!-- table: headlines -->\n<!-- end of table -->",
            "table 'headlines': there is no such table; known are",
        ),
        ("<!-- table: headline -->\n", "table 'headline': lacks its end"),
        ("<!-- table: headline -->\n<!-- table: step-7b -->\n<!-- end of table -->", "table 'headline': lacks its end"),
        ("1.0<!-- quickstart: int8h.rate -->", "quickstart: 'int8h.rate' has no 'rate'; there is "),
        ("1.0<!-- quickstart: int8h -->", "quickstart: 'int8h' is a dict; a figure is a number"),
        ("1.0<!-- quick: taco.ratio -->", "summary.json: cannot be read as results (FileNotFoundError)"),
    ],
)
def test_wrong_marks_are_one_line_and_exit_code_2(wrong, said, copy, tables, capsys):
    page = copy / "docs/data.md"
    page.write_text(page.read_text() + wrong)
    before = page.read_text()
    assert tables.main(["--root", str(copy)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: docs/data.md: ") and said in error and error.count("\n") == 1
    assert page.read_text() == before


def test_the_script_needs_no_installed_package(run_python):
    run_python(["-I", "-S", REPOSITORY / "experiments/tables.py", "--check"], devices=None)


# What the documents say of the code


def test_the_reference_has_every_public_name():
    names = re.findall(r"^::: (\S+)$", (REPOSITORY / "docs/api.md").read_text(), flags=re.M)
    last = {name.rpartition(".")[2] for name in names}
    assert set(taco_jax.__all__) <= last
    for module in (taco_jax.linen, taco_jax.tensor_parallel):
        assert {f"{module.__name__}.{name}" for name in module.__all__} <= set(names)
    commands = [path.stem for path in (REPOSITORY / "taco_jax").glob("*.py") if "__main__" in path.read_text()]
    headings = anchors(REPOSITORY / "docs/api.md")
    assert commands and {*commands, "train"} <= headings


def test_codecs_have_the_bits_that_the_documents_say():
    rows = [line.split("|") for line in prose(REPOSITORY / "docs/codecs.md").splitlines() if line.startswith("| `")]
    checked = set()
    for _, names, _, _, _, _, bits, ratios, _ in (row for row in rows if len(row) == 9):
        names, bits, ratios = (re.findall(r"`([^`]+)`", cell) for cell in (names, bits, ratios))
        for name, codec_bits, ratio in zip(names, bits * len(names), ratios * len(names)):
            codec = taco_jax.CODECS[name]
            if not (codec.exact or codec.per_token):
                assert (f"{codec.bits:g}", f"{16 / codec.bits:.2f}") == (codec_bits, ratio), name
            checked.add(name)
    assert checked == set(taco_jax.CODECS) - {"none"}
