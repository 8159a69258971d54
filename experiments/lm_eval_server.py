"""Runs EleutherAI's lm-evaluation-harness (the package lm-eval) against `python -m taco_jax.serve`, and beside it with
the harness's own model `hf` on the same weights: accuracy, perplexity and the log-likelihood of every request.

    python experiments/lm_eval_server.py --model SmolLM2-135M-Instruct.Q4_1.gguf --runs 1,1:none:text,3:int8h --out out

The tasks are made of the packaged text, or of --text, and need no network:

next_words   multiple choice: which of four continuations of a passage is its own (`loglikelihood`)
passages     perplexity of long passages, in windows (`loglikelihood_rolling`)

--runs names servers, each TP[:CODEC][:text]. The harness sends token ids, or, where `text` is said, texts: then of
next_words alone, for the windows of passages end inside of words. `hf` reads a transformers folder: --model itself, or
what transformers makes of a .gguf file. Needs `pip install '.[lm-eval,serve,gguf]'`. What OUT has is kept: delete
OUT/summary.json to begin again.

output     OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import runs

import taco_jax.data
from taco_jax.codec import CODECS
from taco_jax.config import ConfigError, cli
from taco_jax.inference.model_folder import is_run

CHOICES, PASSAGE_WORDS, CHOICE_WORDS = 4, 60, 12
TASKS = ("next_words", "passages")
MISSING = "is not installed; pip install 'taco-jax[lm-eval]'"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# The harness keeps a place of its window for the token that a server must generate, and one for the first token.
PLACES = 2
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
output_type: {kind}
"""
OF_NEXT_WORDS = """doc_to_text: "{{passage}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
OF_PASSAGES = """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
"""


class Served(NamedTuple):
    """One of --runs."""

    tp: int
    codec: str
    text: bool

    @property
    def tasks(self) -> Sequence[str]:
        return TASKS[:1] if self.text else TASKS


def parse_run(run: str) -> Served:
    tp, *rest = run.split(":")
    text = rest[-1:] == ["text"]
    codec = rest[: len(rest) - text] or ["none"]
    good = tp.isdecimal() and int(tp) > 0 and len(codec) == 1
    runs.require(good, "--runs", repr(run), "must be TP[:CODEC][:text], for example 3:int8h")
    runs.choices("--runs", codec[0], CODECS)
    return Served(int(tp), codec[0], text)


def write_tasks(folder: Path, words: list[str], questions: int, passages: int, length: int) -> None:
    """Both tasks as the harness reads them. length: words of a passage whose perplexity is asked for."""
    numbers = random.Random(0)
    span = PASSAGE_WORDS + CHOICE_WORDS
    starts = numbers.sample(range(0, len(words) - span, span), questions * CHOICES)
    docs = []
    for i in range(questions):
        own, *others = starts[i * CHOICES : (i + 1) * CHOICES]
        choices = [" ".join(words[start + PASSAGE_WORDS : start + span]) for start in (own, *others)]
        answer = numbers.randrange(CHOICES)
        choices[0], choices[answer] = choices[answer], choices[0]
        docs.append({"passage": " ".join(words[own : own + PASSAGE_WORDS]), "choices": choices, "answer": answer})
    _write_task(folder, TASKS[0], "multiple_choice", OF_NEXT_WORDS, docs)
    starts = numbers.sample(range(0, len(words) - length, length), passages)
    docs = [{"text": " ".join(words[start : start + length])} for start in starts]
    _write_task(folder, TASKS[1], "loglikelihood_rolling", OF_PASSAGES, docs)


def _write_task(folder: Path, name: str, kind: str, rest: str, docs: list[dict[str, Any]]) -> None:
    lines = folder / f"{name}.jsonl"
    lines.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, path=lines, kind=kind) + rest)


def transformers_folder(model: Path, folder: Path) -> Path:
    """A folder with the model's weights in float32 and its tokenizer: `model` itself, or made of a .gguf file."""
    if model.is_dir():
        rule = "must be a transformers folder or a .gguf file; of a run what export writes, with --merge"
        runs.require((model / "config.json").is_file() and not is_run(model), "--model", model, rule)
        return model
    from transformers import AutoModelForCausalLM

    from taco_jax.inference.loading import open_checkpoint

    runs.file("--model", model, "a transformers folder or a .gguf file")
    read = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype="float32")
    del read.config.quantization_config  # the weights are floats now
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    checkpoint = open_checkpoint(model)
    checkpoint.tokenizer.library.save(str(folder / "tokenizer.json"))
    special = dict(checkpoint.template.tokens) if checkpoint.template else {}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return folder


@contextmanager
def serving(model: Path, served: Served, longest: int, dtype: str) -> Iterator[tuple[str, str]]:
    """(the model's name, its address) of a server that runs meanwhile."""
    command = [sys.executable, "-m", "taco_jax.serve", "--model", str(model), "--tp", str(served.tp)]
    command += ["--devices", f"cpu:{served.tp}", "--dtype", dtype, "--port", "0", "--max-length", str(longest)]
    command += ["--compression", served.codec] if served.codec != "none" else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = re.fullmatch(r"serving (\S+) at (http://\S+)/v1\n", process.stdout.readline())
        if not found:
            raise ConfigError(f"--runs {served.tp}:{served.codec}: the server did not start; its error is above")
        yield found[1], found[2]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def harness(tasks: Path, names: Sequence[str], out: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns lm-eval's metrics, {task: {metric: value}}, and {task: log-likelihoods of its requests, in order}."""
    said = ",".join(f"{key}={value}" for key, value in arguments.items())
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", said, "--tasks", ",".join(names)]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples"]
    command += ["--device", "cpu", "--batch_size", "4"] if model == "hf" else []
    environment = os.environ | OFFLINE | {"HF_HOME": str(out / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"lm-eval --model {model}: exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    (results,) = out.glob("**/results_*.json")
    values = json.loads(results.read_text())["results"]
    metrics = {
        name: {key.partition(",")[0]: value for key, value in values[name].items() if isinstance(value, float)}
        for name in names
    }
    likelihoods, greedy = {}, {}
    for name in names:
        (path,) = out.glob(f"**/samples_{name}_*.jsonl")
        samples = sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        replies = [reply for sample in samples for reply in _replies(sample)]
        likelihoods[name] = [float(value) for value, _ in replies]
        greedy[name] = [is_greedy for _, is_greedy in replies]
    return {"metrics": metrics, "log_likelihoods": likelihoods, "greedy": greedy}


def _replies(sample: dict[str, Any]) -> list[tuple[Any, bool | None]]:
    """(log-likelihood, whether all tokens were the likeliest ones) of each request of a document."""
    replies = [value for reply in sample["resps"] for value in reply]
    return [(reply[0], str(reply[1]) == "True") if isinstance(reply, list) else (reply, None) for reply in replies]


def difference(result: dict[str, Any], reference: dict[str, Any], task: str) -> dict[str, float]:
    """Returns how far a task's log-likelihoods are apart, in nats, and how many answers differ in greedy."""
    pairs = zip(result["log_likelihoods"][task], reference["log_likelihoods"][task], strict=True)
    apart = [abs(a - b) for a, b in pairs]
    same = zip(result["greedy"][task], reference["greedy"][task], strict=True)
    return {
        "largest": max(apart),
        "mean": sum(apart) / len(apart),
        "greedy_differs": sum(a != b for a, b in same),
    }


def report(out: Path, results: dict[str, dict], args) -> None:
    lines = runs.header("lm-eval against the server, beside its own `hf` model", args.commit)
    lines += [
        f"`{args.model.name}`, {args.dtype}, on emulated CPU devices: `next_words`, {args.questions} passages of "
        f"{PASSAGE_WORDS} words with {CHOICES} continuations of {CHOICE_WORDS}; `passages`, the perplexity of "
        f"{args.passages} passages of {args.words} words in windows of {args.window - PLACES} tokens. `hf` is the "
        "harness's own model, in float32 on what transformers makes of the same file; the others are the harness's "
        "`local-completions` on `python -m taco_jax.serve` at that tp, with that codec; `text`: prompts sent as "
        "texts, not as ids. Apart: the largest and the mean difference from `hf` of a request's log-likelihood, "
        "in nats.",
        "",
        "| model | accuracy of next_words | apart: largest, mean | word perplexity of passages | of bytes "
        "| apart: largest, mean |",
        "|---" * 6 + "|",
    ]
    for name, result in results.items():
        cells = [f"`{name}`"]
        for task, keys in zip(TASKS, (("acc",), ("word_perplexity", "byte_perplexity"))):
            of = result["metrics"].get(task)
            cells += [f"{of[key]:.4f}" if of else "" for key in keys]
            apart = result.get("apart", {}).get(task)
            cells += [f"{apart['largest']:.5f}, {apart['mean']:.5f}" if apart else ""]
        lines.append("| " + " | ".join(cells) + " |")
    (out / "README.md").write_text("\n".join(lines) + "\n")
    (out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


def read_words(path: Path | None) -> list[str]:
    path = path or Path(taco_jax.data.__file__).parent / "quickstart_austen.txt.xz"
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as text:
        return text.read().split()


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", default="1,1:none:text,2:int8h")
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--words", type=int, default=800, help="words of each of the passages")
    parser.add_argument("--window", type=int, default=512, help="max_length of the harness; also the server's")
    parser.add_argument("--concurrent", type=int, default=4, help="requests at once")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    named = {run: parse_run(run) for run in args.runs.split(",")}
    for key in ("questions", "passages", "words", "concurrent"):
        runs.require(getattr(args, key) > 0, f"--{key}", getattr(args, key), "must be above 0")
    runs.require(args.window > PLACES + 1, "--window", args.window, f"must be above {PLACES + 1}")
    if args.text is not None:
        runs.file("--text", args.text, "a text, plain or .xz")
    if find_spec("lm_eval") is None:
        raise ConfigError(f"the package lm-eval {MISSING}")
    words = read_words(args.text)
    least = max(args.questions * CHOICES * (PASSAGE_WORDS + CHOICE_WORDS), args.passages * args.words) + args.words
    runs.require(len(words) > least, "--text", args.text, f"has {len(words)} words; these tasks need {least}")
    runs.folder("--out", args.out)
    kept = args.out / "summary.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for part in ("tasks", "model"):
            (scratch / part).mkdir()
        write_tasks(scratch / "tasks", words, args.questions, args.passages, args.words)
        folder = transformers_folder(args.model.resolve(), scratch / "model")
        for i, (name, served) in enumerate([("hf", None), *named.items()]):
            if name in results:
                continue
            out = scratch / f"out{i}"
            if served is None:
                hf = {"pretrained": folder, "dtype": "float32", "max_length": args.window - PLACES}
                results[name] = harness(scratch / "tasks", TASKS, out, "hf", hf)
            else:
                with serving(args.model, served, args.window, args.dtype) as (model, url):
                    options = {
                        "model": model, "base_url": f"{url}/v1/completions", "tokenizer": folder,
                        "tokenizer_backend": "huggingface", "tokenized_requests": not served.text,
                        "max_length": args.window, "num_concurrent": args.concurrent,
                    }  # fmt: skip
                    results[name] = harness(scratch / "tasks", served.tasks, out, "local-completions", options)
                tasks = {task: difference(results[name], results["hf"], task) for task in served.tasks}
                results[name] |= {"apart": tasks}
            shown = ["hf", *(run for run in named if run in results)]
            report(args.out, {name: results[name] for name in shown}, args)
            print(name, results[name]["metrics"], results[name].get("apart", ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
