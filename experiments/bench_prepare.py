"""Times `python -m taco_jax.prepare` beside `datasets.map` with the same tokenizer, on the same cores.

    python experiments/bench_prepare.py --corpus CORPUS --tokenizer tokenizer.json --out experiments/results/prepare

CORPUS is a folder of *.train.txt.xz. Its text, cut into documents, goes into one .jsonl. Each program reads it in a
process of its own, from start to end:

prepare               hashes, encodes and writes token files
prepare, no copies    the same with --drop-duplicates
datasets              load_dataset, then map: a batch is encoded by the package tokenizers itself, and kept as Arrow
datasets, fast        the same by PreTrainedTokenizerFast of transformers, as most programs have it

The programs run in turn, a few rounds. CPU seconds are those of the program and its workers: they say what the work
costs where other programs keep the cores busy. Needs the packages datasets and transformers.

output    OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import datetime
import json
import lzma
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import runs

from taco_jax.config import ConfigError, cli

DATASETS = """
import sys
source, tokenizer_file, cache, workers, kind, end = sys.argv[1:]
import datasets
datasets.disable_progress_bars()
if kind == "fast":
    from transformers import PreTrainedTokenizerFast
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file)
    encode = lambda texts: tokenizer(texts, add_special_tokens=False)["input_ids"]
    number = tokenizer.convert_tokens_to_ids(end)
else:
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(tokenizer_file)
    encode = lambda texts: [part.ids for part in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    number = tokenizer.token_to_id(end)
data = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)
work = lambda batch: {"ids": [[*ids, number] for ids in encode(batch["text"])]}
data = data.map(work, batched=True, num_proc=int(workers), remove_columns=data.column_names)
print(len(data))
"""
PROGRAMS = ("prepare", "prepare, no copies", "datasets", "datasets, fast")


def write_documents(corpus: Path, file: Path, megabytes: float, chars: int) -> tuple[int, int]:
    """Writes the corpus as lines of {"text": ...}, of about `chars` characters. Returns (documents, bytes of text)."""
    documents = size = 0
    with file.open("w") as out:
        for path in sorted(corpus.glob("*.train.txt.xz")):
            text = lzma.open(path, "rt", encoding="utf-8").read()
            start = 0
            while start < len(text) and size < megabytes * 1e6:
                end = text.find("\n", start + chars) + 1 or len(text)
                out.write(json.dumps({"text": text[start:end]}) + "\n")
                size += len(text[start:end].encode())
                documents, start = documents + 1, end
    return documents, size


def measure(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Runs a program. Returns its seconds, and its CPU seconds with those of its workers."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ConfigError(f"{' '.join(command)[:200]}: ended with status {status}: {errors[-500:]}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def command(program: str, source: Path, folder: Path, args) -> list[str]:
    if program.startswith("prepare"):
        more = ["--drop-duplicates"] if "copies" in program else []
        where = ["--out", str(folder / "out"), "--tokenizer", str(args.tokenizer), "--end-token", args.end_token]
        flags = [*where, "--workers", str(args.workers), *more]
        return [sys.executable, "-m", "taco_jax.prepare", str(source), *flags]
    kind = "fast" if "fast" in program else "library"
    where = [str(source), str(args.tokenizer), str(folder / "cache"), str(args.workers), kind, args.end_token]
    return [sys.executable, "-c", DATASETS, *where]


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--end-token", default="<|endoftext|>")
    parser.add_argument("--megabytes", type=float, default=40.0, help="text to take")
    parser.add_argument("--document-chars", type=int, default=3000, help="length of a document")
    parser.add_argument("--workers", type=int, default=2, help="processes of each program, and cores of all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    runs.require(1 <= args.workers <= len(cores), "--workers", args.workers, f"must be from 1 to {len(cores)} cores")
    for key in ("megabytes", "document_chars", "rounds"):
        runs.require(getattr(args, key) > 0, f"--{key.replace('_', '-')}", getattr(args, key), "must be above 0")
    runs.require(any(args.corpus.glob("*.train.txt.xz")), "--corpus", args.corpus, "must hold *.train.txt.xz files")
    runs.file("--tokenizer", args.tokenizer, "name a tokenizer.json")
    runs.packages("datasets", "transformers", install="datasets transformers")
    runs.folder("--out", args.out)
    os.sched_setaffinity(0, set(cores[: args.workers]))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    times: dict[str, list[tuple[float, float]]] = {program: [] for program in PROGRAMS}
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "text.jsonl"
        documents, size = write_documents(args.corpus, source, args.megabytes, args.document_chars)
        cli.say(f"{documents:,} documents, {size / 1e6:.1f} MB of text")
        for _ in range(args.rounds):
            for program in PROGRAMS:
                with tempfile.TemporaryDirectory(dir=made) as folder:
                    times[program].append(measure(command(program, source, Path(folder), args), environment))
                seconds, cpu = times[program][-1]
                loads.append(os.getloadavg()[0])
                cli.say(f"{program}: {seconds:.1f} s, {cpu:.1f} CPU seconds, load {loads[-1]:.1f}")
    results = {
        program: {
            "seconds": round(statistics.median(t[0] for t in found), 2),
            "cpu_seconds": round(statistics.median(t[1] for t in found), 2),
            "fastest_seconds": round(min(t[0] for t in found), 2),
        }
        for program, found in times.items()
    }
    for row in results.values():
        row["documents_per_second"] = round(documents / row["seconds"])
        row["mb_per_second"] = round(size / 1e6 / row["seconds"], 2)
        row["mb_per_cpu_second"] = round(size / 1e6 / row["cpu_seconds"], 2)
    summary = {
        "documents": documents, "text_bytes": size, "workers": args.workers, "rounds": args.rounds,
        "load": [round(min(loads), 1), round(max(loads), 1)], "programs": results,
    }  # fmt: skip
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    about = header(args)
    (args.out / "README.md").write_text("\n".join(about + page(summary)) + "\n")
    cli.say("\n".join(page(summary)))


def header(args) -> list[str]:
    """The opening lines of the result. The command names the corpus and the tokenizer without their folders."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("tokenizers", "datasets", "transformers"))
    flags = f"--corpus {args.corpus.name} --tokenizer {args.tokenizer.name} --megabytes {args.megabytes:g}"
    return [
        "# Text to tokens: prepare beside datasets.map",
        "",
        f"* date: {datetime.date.today()}",
        f"* hardware: {args.workers} cores of {platform.machine()}, Python {platform.python_version()}, {versions}",
        f"* commit: {args.commit or runs.commit()}",
        f"* command: `python experiments/bench_prepare.py {flags} --workers {args.workers} --rounds {args.rounds}`",
        "",
    ]


def page(summary: dict) -> list[str]:
    lines = [
        f"{summary['documents']:,} documents, {summary['text_bytes'] / 1e6:.1f} MB of text, {summary['workers']} "
        f"worker processes, from the start of a program to its end. Medians of {summary['rounds']} rounds, programs in "
        f"turn; the machine's load was {summary['load'][0]} to {summary['load'][1]}.",
        "",
        "| program | documents/s | MB/s | seconds | CPU seconds | MB per CPU second |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in summary["programs"].items():
        cells = (row["documents_per_second"], row["mb_per_second"], row["seconds"], row["cpu_seconds"])
        lines.append(f"| {name} | " + " | ".join(map(str, (*cells, row["mb_per_cpu_second"]))) + " |")
    return lines


if __name__ == "__main__":
    sys.exit(cli.run(main))
