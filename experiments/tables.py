"""Writes the figures of README.md and docs/*.md from experiments/results/*/summary.json, and what `auto` takes.

    python experiments/tables.py             writes every page anew
    python experiments/tables.py --check     exit code 1 if a page would change, and its name

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; NAME is a key of `TABLES` below. A figure of
the text has its source behind it: `1.94<!-- quickstart: int8h.ratio -->` is rounded to the decimals that it shows, and
`0.4 %<!-- ... -->` shows a fraction as percent. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- table: {} -->", "<!-- end of table -->"
# What begins a table, its body where the end is found before another table begins, and that end.
MARKED = re.compile(r"<!-- table: (\S+) -->(?:((?:(?!<!-- table: ).)*?)<!-- end of table -->)?", re.S)
# A number, its unit, the folder of results and the dotted key.
FIGURE = re.compile(r"(-?\d[\d,]*(?:\.(\d+))?)( ?%|)<!-- (\w+): (.+?) -->")
PRESETS = ("taco", "int8h", "int6h", "int5h", "int4h", "mxfp4")
Row = Sequence[str]


class TableError(ValueError):
    """A page, a mark or a result that cannot be. Its message is one line. Exit code 2."""


class Figures:
    """Figures of the results under ROOT/experiments/results, as text."""

    def __init__(self, root: Path):
        self.results = root / "experiments" / "results"

    @functools.cache  # noqa: B019 (lives as long as the program)
    def _summary(self, folder: str):
        path = self.results / folder / "summary.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TableError(f"{path}: cannot be read as results ({type(error).__name__}); name a folder of "
                             "experiments/results that has a summary.json") from None  # fmt: skip

    def _at(self, folder: str, key: str):
        """Returns what stands at a dotted key. Raises TableError where nothing does."""
        value = self._summary(folder)
        for part in key.split("."):
            try:
                value = value[int(part) if isinstance(value, list) else part]
            except (KeyError, IndexError, TypeError, ValueError):
                known = ", ".join(map(str, value))[:200] if isinstance(value, dict) else f"a {type(value).__name__}"
                raise TableError(f"{folder}: {key!r} has no {part!r}; there is {known}") from None
        return value

    def rows(self, folder: str, key: str) -> list[dict]:
        """The list of objects at a dotted key. Raises TableError where there is none."""
        value = self._at(folder, key)
        if not (isinstance(value, list) and all(isinstance(row, dict) for row in value)):
            raise TableError(f"{folder}: {key!r} is a {type(value).__name__}; rows are a list of objects")
        return value

    def value(self, folder: str, key: str) -> float:
        """The number at a dotted key. Raises TableError where there is none."""
        value = self._at(folder, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TableError(f"{folder}: {key!r} is a {type(value).__name__}; a figure is a number")
        return value

    def recommended(self) -> dict[str, dict]:
        """Returns what `auto` takes by use, as the package has it. Raises TableError where the file is missing."""
        path = self.results.parent.parent / "taco_jax" / "compression" / "recommended.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise TableError(f"{path}: cannot be read ({type(error).__name__}); python experiments/fit_forecast.py "
                             "writes it") from None  # fmt: skip

    def number(self, folder: str, key: str, decimals: int = 0) -> str:
        return f"{self.value(folder, key):.{decimals}f}"

    def times(self, folder: str, key: str, decimals: int = 2) -> str:
        """How many times as fast."""
        return f"{self.number(folder, key, decimals)}x"

    def percent(self, folder: str, key: str) -> str:
        """A fraction in percent: one decimal, below 0.1 % two."""
        value = 100 * self.value(folder, key)
        return f"{value:.{2 if abs(value) < 0.1 else 1}f} %"

    def change(self, folder: str, key: str, decimals: int) -> str:
        """A fraction in percent, with its sign."""
        return f"{100 * self.value(folder, key):+.{decimals}f} %"


# The tables: the head, then the rows.


def headline(figures: Figures) -> Iterable[Row]:
    """README's. At most ten figures (tests/project/test_documents.py)."""
    yield "", "`taco`", "`int6h`", "`int4h`"
    step = [figures.times("qwen7b_tp4_kernels", f"host.{codec}.speedup") for codec in ("taco", "int6h", "int4h")]
    yield "Training step of a 7B model, tp 4, link over host memory: speed against exact", *step
    over_nvlink = figures.times("qwen7b_tp4_nvlink", "nvlink.taco.speedup")
    yield "The same step over NVLink, one kernel a sum", over_nvlink, "", ""
    drop_in = [figures.times("dropin_2gpus_host", f"maxtext.{codec}.speedup") for codec in ("int6h", "int4h")]
    yield "MaxText's own step under the compiler hook, tp 2, link over host memory: speed against exact", "", *drop_in
    loss = [figures.change("accuracy", f"gpt2_124m.{codec}.difference", 2) for codec in ("taco", "int6h")]
    yield "Validation loss of GPT-2 124M trained at tp 2, mean of the seeds, against exact", *loss, ""
    change = [figures.change("perplexity_smollm2", f"{c}_feedback.change", 1) for c in ("taco", "int4h")]
    yield (
        "Perplexity of a 135M model at tp 3 with error feedback (emulated), against exact",
        change[0],
        "",
        change[1],
    )


def step_7b(figures: Figures) -> Iterable[Row]:
    codecs = ("taco", "int6h", "int4h")
    yield "link", "exact", *(f"`{codec}`" for codec in codecs), "nothing sent: the ceiling"
    for link, name in (("host", "host memory (`NCCL_P2P_DISABLE=1`)"), ("nvlink", "NVLink")):
        cells = [figures.number("qwen7b_tp4_kernels", f"{link}.none.ms")]
        for codec in (*codecs, "free"):
            key = f"{link}.{codec}"
            speed = figures.times("qwen7b_tp4_kernels", f"{key}.speedup")
            cells.append(f"{figures.number('qwen7b_tp4_kernels', f'{key}.ms')} ({speed})")
        yield name, *cells


def drop_in(figures: Figures) -> Iterable[Row]:
    codecs = ("int8h", "int6h", "int4h")
    programs = {
        "maxtext": "MaxText 0.2.5, its trainer's own step",
        "tunix": "google-tunix 0.1.7, its trainer's own step of a Qwen3",
        "stack": "MLP layers under `scan` and `jax.checkpoint`, plain `jax.jit`",
    }
    yield "program", "link", "exact ms", *(f"`{codec}`" for codec in codecs)
    for link, name in (("host", "host memory"), ("nvlink", "NVLink")):
        folder = f"dropin_2gpus_{link}"
        for program, words in programs.items():
            of_link = codecs if link == "host" or program == "tunix" else ("int8h", "int4h")
            cells = [figures.times(folder, f"{program}.{c}.speedup") if c in of_link else "" for c in codecs]
            yield words, name, figures.number(folder, f"{program}.none.ms", 1), *cells
    for link, name in (("host", "host memory"), ("nvlink", "NVLink")):
        folder = f"dropin_2gpus_{link}"
        own = [figures.times(folder, f"own trainer.{codec}.speedup") for codec in codecs]
        exact = figures.number(folder, "own trainer.none.ms", 1)
        yield "for comparison: `taco_jax.train`, a Qwen2.5", name, exact, *own


def codec_kernels(figures: Figures) -> Iterable[Row]:
    cards = ("h100", "h200")
    yield "codec", "encode, H100", "H200", "decode, H100", "H200", "reduce 4 wires, H100", "H200"
    for codec in PRESETS:
        cells = []
        for operation in ("encode", "decode", "reduce"):
            for card in cards:
                folder, key = f"codec_kernels_{card}", f"codecs.{codec}.mosaic.{operation}"
                share = figures.number(folder, f"{key}.of_copy", 2)
                cells.append(f"{share} ({figures.times(folder, f'{key}.against_xla', 1)})")
        yield f"`{codec}`", *cells


def sums_nvlink(figures: Figures) -> Iterable[Row]:
    yield "elements", "`taco`, 4 GPUs", "`int4h`", "separate kernels, `taco`", "`taco`, 2 GPUs", "`int4h`"
    for millions in (4, 16, 64, 256):
        key = str(1024 * millions)
        four = [figures.times("allreduce_4gpus", f"{key}.{codec}.speedup") for codec in ("taco", "int4h", "taco:nccl")]
        if millions == 4:
            two = [figures.times("psum_small_2gpus", f"{key}.taco.speedup"), "not measured"]
        else:
            two = [figures.times("allreduce_2gpus", f"{key}.{codec}.speedup") for codec in ("taco", "int4h")]
        yield f"{millions}M", *four, *two


# NCCL's published bus bandwidth of large exact sums on H100, GB/s: by its ring, 2 to 8 GPUs, and with sums in the
# NVSwitches (NVLS) on 8; on 2 to 4 GPUs NVLS is no faster than the ring. https://github.com/NVIDIA/nccl/issues/1455
RING_GB_S, NVLS_GB_S = 370, 480


def against_published(figures: Figures) -> Iterable[Row]:
    """Ratios of the table of sums as if exact sums were as fast as published: ratio x measured / published."""
    yield ("GPUs", "elements", "exact sum, bus GB/s", "codec", "measured", f"at {RING_GB_S} GB/s: ring",
           f"at {NVLS_GB_S} GB/s: NVLS on 8 GPUs")  # fmt: skip
    for gpus in (2, 4):
        folder = f"allreduce_{gpus}gpus"
        for millions in (16, 64, 256):
            key = str(1024 * millions)
            exact = figures.value(folder, f"{key}.none.bus_gb_s")
            for codec in ("taco", "int4h"):
                ratio = figures.value(folder, f"{key}.{codec}.speedup")
                cells = [f"{ratio * exact / published:.2f}x" for published in (RING_GB_S, NVLS_GB_S)]
                yield str(gpus), f"{millions}M", f"{exact:.0f}", f"`{codec}`", f"{ratio:.2f}x", *cells


def perplexity(figures: Figures) -> Iterable[Row]:
    yield "codec", "times fewer bytes than bf16", "perplexity without", "with error feedback"
    names = {
        "int6h": "`int6h`",
        "int5h": "`int5h`",
        "int4h": "`int4h`",
        "mxfp4": "`mxfp4`",
        "int4h_16": "`int4h,block=16,scale=ue5m3`",
        "mixed": "four bits in blocks of 16, six at six of sixty sites",
    }
    for key, name in names.items():
        folder = "perplexity_smollm2"
        changes = [figures.percent(folder, f"{k}.change") for k in (key, f"{key}_feedback")]
        yield name, figures.number(folder, f"{key}.ratio", 2), *changes


def forecast_errors(figures: Figures) -> Iterable[Row]:
    yield "rows", "number", "median error", "worst", "speed-ups: median error", "worst"
    for group in ("steps of 7B", "first token", "small steps", "all"):
        key = f"groups.{group}"
        name = {
            "steps of 7B": "steps of the 7B model",
            "first token": "times to the first token, 7B, one and two GPUs",
            "small steps": "steps of models of 350M parameters and fewer",
            "all": "all",
        }
        cells = [figures.percent("forecast", f"{key}.{value}") for value in ("median", "worst")]
        speed = [f"{key}.speedup_median", f"{key}.speedup_worst"]
        has = group != "all"
        more = [figures.percent("forecast", k) for k in speed] if has else ["", ""]
        yield name[group], figures.number("forecast", f"{key}.rows"), *cells, *more


def forecast_published(figures: Figures) -> Iterable[Row]:
    yield "source", "what", "published", "forecast", "error"
    number = lambda values: " to ".join(f"{v:.0f}" if v >= 100 else f"{v:.2f}" for v in values)
    for row in figures.rows("forecast", "published"):
        error = "no forecast" if row["error"] is None else f"{100 * row['error']:+.0f} %"
        yield row["source"], row["what"], number(row["published"]), number(row["forecast"]), error


def forecast_constants(figures: Figures) -> Iterable[Row]:
    yield "constant", "value"
    at = lambda key, decimals=0: figures.number("forecast", f"constants.{key}", decimals)
    share = lambda key: figures.percent("forecast", f"constants.{key}")
    yield "products: share of the peak, of a tile's sums, at the highest clocks", share("product.share_of_peak")
    yield "products: K0, the start and end of a tile as steps of k", at("product.k0")
    yield "products: FLOPs' worth of a value that a step of k brings", at("product.load")
    yield "products: share of the memory traffic that is not beside multiplication", share("product.memory")
    yield "products: start, beside that of any kernel", f"{at('product.start_us', 1)} us"
    yield "limit of power: times as long, where there is nothing but products", at("power.alone", 2)
    for what in ("forward", "backward"):
        rates = f"{at(f'attention.{what}.ps_per_flop', 5)} ps, {at(f'attention.{what}.ps_per_pair', 2)} ps"
        yield f"attention, {what}: a FLOP, a pair; start", f"{rates}; {at(f'attention.{what}.us', 1)} us"
    yield "two GPUs that wait for each other: products longer by", share("slowest.longer")
    yield "start of a kernel", f"{at('start.us', 1)} us"
    yield "start and end of a program, from the host to the host", f"{at('start.host_us')} us"
    yield "sums over tokens: start", f"{at('sum.us', 1)} us"
    yield "sums over tokens: share of the fastest copy's bandwidth", share("sum.share_of_copy")
    yield "zeros: share of the fastest copy's bandwidth", share("zeros.share_of_copy")
    yield "GELU: a value", f"{at('gelu.ps_per_value', 2)} ps"
    yield "work beside a message over NVLink: longer by, as a share of the message's time", share("beside.longer")
    yield "work beside a message over other links: longer by", share("beside.over_host")
    yield "a sum's wires by copy engines", f"{at('copy.us', 1)} us, {at('copy.gb_s')} GB/s"
    for card in ("H200", "H100 80GB HBM3"):
        yield f"memory: share of the data sheet's, {card}", share(f"memory.share_of_sheet.{card}")
    feedback = f"{at('feedback.bytes_per_element', 1)}; {at('feedback.us', 1)} us"
    yield "error feedback: bytes for each element; start", feedback
    for link, name in (("nvlink", "NVLink"), ("host", "host memory")):
        for ranks in (2, 4):
            key = f"links.{link}"
            rate = lambda what, k=key, n=ranks: f"{at(f'{k}.{what}.{n}.us')} us, {at(f'{k}.{what}.{n}.gb_s')} GB/s"
            yield f"{name}, {ranks} ranks: an exact sum", rate("exact")
            yield f"{name}, {ranks} ranks: a hop of a compressed one", rate("hop")
            if link == "nvlink":
                yield f"{name}, {ranks} ranks: a sum in one kernel", rate("kernel")
    yield "start of a hop's kernels", f"{at('links.start_us')} us"


def forecast_scale(figures: Figures) -> Iterable[Row]:
    ways = ("tp", "dp", "taco", "int6h", "int4h")
    yield "shape", "between hosts", "GPUs", "exact: dp x pp x tp", "of it messages", *(f"`{way}`" for way in ways)
    for shape in ("7B", "70B", "405B"):
        for speed in ("400Gb/s", "100Gb/s", "25Gb/s"):
            points = figures.rows("scale", f"{shape}.{speed}.8")
            last = max(p["gpus"] for p in points)
            of = {p["way"]: p for p in points if p["gpus"] == last}
            exact = of["none"]
            layout = f"{exact['dp']} x {exact['pp']} x {exact['tp']}"
            gains = [f"{of[way]['tokens'] / exact['tokens']:.2f}x" for way in ways]
            yield shape, speed, f"{last:,}", layout, f"{100 * exact['messages']:.0f} %", *gains


# Use of recommended.json -> what it is, in words.
USES = {
    "training": "training: activations and their gradients over tp",
    "stages": "training: what stages of a pipeline send, forward and back",
    "gradients": "training: the gradients' sum over dp",
    "weights": "training: weights that ZeRO-1 sends back",
    "first_token_feedback": "inference, where sums take along what the one before lost",
    "first_token": "inference, where they do not: over NVLink in one kernel, with norms behind sums",
}


def _takes(row: dict) -> tuple[str, float]:
    """The codecs of a use, and the share of the bytes of bf16."""
    both = (row["forward"], row["backward"])
    names = "exact" if both == ("none", "none") else ", ".join(f"`{codec}`" for codec in dict.fromkeys(both))
    return names, row["bits"] / 16


def recommended(figures: Figures) -> Iterable[Row]:
    """The page's: what `auto` takes by use, with the row of the record that speaks for it."""
    yield "use", "`auto` takes", "times fewer bytes than bf16", "change against exact", "record"
    for use, words in USES.items():
        row = figures.recommended()[use]
        (names, share), found = _takes(row), row["record"]
        if found is None:
            yield words, names, f"{1 / share:.2f}", "no row counts", ""
            continue
        pairs = f", {found['runs']} pairs" if found["runs"] > 1 else ""
        change = f"{100 * found['change']:+.2f} % (standard error {100 * found['error']:.2f} %{pairs})"
        yield words, names, f"{1 / share:.2f}", change, found["source"]


def recommended_short(figures: Figures) -> Iterable[Row]:
    """README's."""
    yield "use", "`auto` takes", "bytes against bf16"
    for use, words in USES.items():
        names, share = _takes(figures.recommended()[use])
        yield words, names, "all" if share == 1 else f"about {Fraction(share).limit_denominator(8)}"


TABLES: dict[str, Callable[[Figures], Iterable[Row]]] = {
    "headline": headline,
    "step-7b": step_7b,
    "codec-kernels": codec_kernels,
    "sums-nvlink": sums_nvlink,
    "sums-published": against_published,
    "drop-in": drop_in,
    "perplexity": perplexity,
    "recommended": recommended,
    "recommended-short": recommended_short,
    "forecast-errors": forecast_errors,
    "forecast-published": forecast_published,
    "forecast-constants": forecast_constants,
    "forecast-scale": forecast_scale,
}


def table(name: str, figures: Figures) -> str:
    """A table in Markdown. Raises TableError for a name that there is not."""
    if name not in TABLES:
        raise TableError(f"table {name!r}: there is no such table; known are {', '.join(TABLES)}")
    head, *rows = TABLES[name](figures)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in lines)


def rewrite(text: str, figures: Figures) -> str:
    """A page's text with every table and figure made anew.

    Raises:
      TableError: a mark without its end, or one that names what there is not.
    """

    def new_table(match: re.Match) -> str:
        name, body = match[1], match[2]
        if body is None:
            raise TableError(f"table {name!r}: lacks its end, {END}")
        return f"{BEGIN.format(name)}\n\n{table(name, figures)}\n\n{END}"

    def new_figure(match: re.Match) -> str:
        number, decimals, unit, folder, key = match.groups()
        value = figures.value(folder, key) * (100 if "%" in unit else 1)
        comma = "," if "," in number else ""
        return f"{value:{comma}.{len(decimals or '')}f}{unit}<!-- {folder}: {key} -->"

    return FIGURE.sub(new_figure, MARKED.sub(new_table, text))


def pages(root: Path) -> list[Path]:
    """README.md and the pages of docs."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository whose pages are written")
    options = parser.parse_args(args)
    figures = Figures(options.root)
    new = {}
    for page in pages(options.root):
        try:
            text = page.read_text(encoding="utf-8")
            if (written := rewrite(text, figures)) != text:
                new[page] = written
        except OSError as error:
            print(f"error: {page}: {error.strerror}", file=sys.stderr)
            return 2
        except TableError as error:
            print(f"error: {page.relative_to(options.root)}: {error}", file=sys.stderr)
            return 2
    for page, text in new.items():
        if options.check:
            print(f"{page.relative_to(options.root)} is not what the results say: python experiments/tables.py")
        else:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page.relative_to(options.root)}")
    return 1 if options.check and new else 0


if __name__ == "__main__":
    sys.exit(main())
