"""Runs the way of a user with text and a model of their own, and compares its end with transformers.

    python experiments/own_text.py                                  # a tiny random model on Jane Austen's novels
    python experiments/own_text.py --model path/to/model --text texts/ --dp 2 --tp 4 --devices cpu:8
    python experiments/own_text.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text texts/ --tp 3 --devices cpu:3

trains     --model, a Hugging Face folder or a .gguf file, on --text; without them a tiny Qwen3 of random weights, which
           transformers makes, on the packaged text
hardware   any: --devices gpu, or cpu:N for emulated devices
takes      one to two minutes for the tiny model on two cores
reaches    transformers' loss of the exported model is the trainer's, to 1e-3 in float32 with exact messages

It prints every command that it runs: prepare, train, train once more with exact messages in float32 (which trains
nothing and says the validation loss), export, serve and a request. Then transformers, from the exported folder alone,
says its loss on the same windows of the validation text and its greedy answer to the same prompt. Needs
`pip install '.[data,inference,serve,gguf]' torch transformers`. Exit code 1: losses or answers differ.

output     OUT/texts, model, data, run, exported; with --results the table in RESULTS/README.md and summary.json
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs

from taco_jax.config import ConfigError, cli

FIRST = r"^step 0: validation loss (\d+\.\d+)"
LAST = r"^validation loss (\d+\.\d+) nats per token"
LIMIT = 1e-3
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
VOCAB, END = 512, "<|endoftext|>"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "starlette", "uvicorn")
INSTALL = "'.[data,inference,serve]' torch transformers"


def pages(characters: int = 400_000) -> list[str]:
    """The beginning of the packaged text, a few pages each."""
    from taco_jax.data import read_text

    text = read_text("austen").tobytes().decode()[:characters]
    return [text[start : start + 4000] for start in range(0, len(text), 4000)]


def write_texts(folder: Path) -> None:
    """Writes the packaged text as lines of {"text": ...}."""
    folder.mkdir(parents=True)
    (folder / "austen.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in pages()))


def write_model(folder: Path, texts: Sequence[str]) -> None:
    """Writes a tiny Qwen3 of random weights with a tokenizer of these texts, as transformers does."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    library = ByteLevelBPETokenizer()
    library.train_from_iterator(texts, VOCAB, special_tokens=[END], show_progress=False)
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library._tokenizer, eos_token=END)
    config = Qwen3Config(vocab_size=VOCAB, eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **TINY)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(*command: str) -> str:
    """Runs `python -m ...` as a user would, showing the command and what it says. Returns what it said."""
    show(command)
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    said = []
    for line in process.stdout:
        said.append(line)
        cli.say(f"    {line.rstrip()}")
    if process.wait():
        raise ConfigError(f"{command[1]}: ended with exit code {process.returncode}")
    return "".join(said)


def show(command: Sequence[str]) -> None:
    cli.say(f"\n$ python {shlex.join(command)}")


def found(pattern: str, said: str) -> float:
    match = re.search(pattern, said, flags=re.M)
    if match is None:
        raise ConfigError(f"train: said no validation loss ({pattern})")
    return float(match[1])


def served_answer(flags: Sequence[str], request: dict[str, Any]) -> str:
    """Starts a server, asks it once, stops it. Returns the text of the answer."""
    command = ["-m", "taco_jax.serve", *flags, "--port", "0"]
    show(command)
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    late = threading.Timer(600, process.kill)
    late.start()
    try:
        line = process.stdout.readline()
        match = re.fullmatch(r"serving (\S+) at (http://\S+)\n", line)
        if match is None:
            raise ConfigError(f"serve: did not start: {line!r}")
        cli.say(f"    {line.rstrip()}")
        url, body = f"{match[2]}/completions", json.dumps({"model": match[1]} | request)
        cli.say(f"\n$ curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}")
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=600) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:  # a prompt that is too long, for one
            raise ConfigError(f"serve: answers {error.code}: {json.load(error)['error']['message']}") from None
        cli.say(f"    {json.dumps(said)[:500]}")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        return said["choices"][0]["text"]
    finally:
        late.cancel()
        process.kill()
        process.wait()


def validation_windows(data: Path, length: int, most: int | None) -> np.ndarray:
    """int64[N, length + 1]: the validation tokens of a prepared folder, cut where the trainer cuts them."""
    meta = json.loads((data / "meta.json").read_text())
    files = [data / file["name"] for file in meta["splits"]["validation"]["files"]]
    ids = np.concatenate([np.fromfile(file, np.dtype(meta["dtype"]).newbyteorder("<")) for file in files])
    starts = range(0, len(ids) - length, length)[:most]
    return np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int64)


def of_transformers(folder: Path, windows: np.ndarray, prompt: str, tokens: int) -> tuple[float, str]:
    """(mean loss per token of the windows, greedy answer to the prompt) of an exported folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = 0.0
    with torch.no_grad():
        for part in np.array_split(windows, -(-len(windows) // 8)):
            ids = torch.as_tensor(part)
            logits = model(ids[:, :-1], use_cache=False).logits.flatten(0, 1)
            total += float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
        given = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        answer = model.generate(given, max_new_tokens=tokens, do_sample=False)[0, given.shape[1] :]
    return total / windows[:, 1:].size, tokenizer.decode(answer, skip_special_tokens=True)


def steps_of(args, text: Path, model: Path) -> dict[str, Any]:
    """Runs every step. Returns what was reached."""
    out = args.out
    data, workdir, exported = out / "data", out / "run", out / "exported"
    prepared = ["--validation", str(args.validation)] + (["--end-token", args.end_token] if args.end_token else [])
    run("-m", "taco_jax.prepare", "--out", str(data), "--tokenizer", str(model), str(text), *prepared)
    most = [] if args.evaluation_batches is None else ["--evaluation.batches", str(args.evaluation_batches)]
    train = [
        "-m", "taco_jax.train", "--init-from", str(model), "--data.train", str(data), "--workdir", str(workdir),
        "--mesh.dp", str(args.dp), "--mesh.tp", str(args.tp), "--devices", args.devices, "--steps", str(args.steps),
        "--global-batch", str(args.global_batch), "--data.sequence-length", str(args.sequence_length),
        "--optimizer.learning-rate", str(args.learning_rate), "--optimizer.warmup-steps", str(min(5, args.steps - 1)),
        *most,
    ]  # fmt: skip
    said = run(*train, "--compression", args.compression, "--compute-dtype", args.compute_dtype)
    first, last = found(FIRST, said), found(LAST, said)
    exact = found(LAST, run(*train, "--compression", "none", "--compute-dtype", "float32"))
    run("-m", "taco_jax.export", str(workdir), "--to", str(exported), "--dtype", "float32")
    windows = None if args.evaluation_batches is None else args.evaluation_batches * args.global_batch
    windows = validation_windows(data, args.sequence_length, windows)
    theirs, greedy = of_transformers(exported, windows, args.prompt, args.answer_tokens)
    request = {"prompt": args.prompt, "max_tokens": args.answer_tokens, "temperature": 0}
    served = ["--model", str(workdir), "--tp", str(args.tp), "--devices", args.devices, "--dtype", "float32"]
    answer = served_answer([*served, "--max-length", "256", "--batch", "1"], request)
    return {
        "model": args.model.name if args.model else "tiny Qwen3, random", "dp": args.dp, "tp": args.tp,
        "steps": args.steps, "compression": args.compression, "compute_dtype": args.compute_dtype,
        "tokens": int(windows[:, 1:].size), "before": first, "after": last, "exact": exact, "transformers": theirs,
        "difference": abs(theirs - exact), "prompt": args.prompt, "answer": answer, "answer_transformers": greedy,
    }  # fmt: skip


def table(reached: dict[str, Any]) -> list[str]:
    """The lines of the report."""
    sent = f"{reached['compression']}, {reached['compute_dtype']}"
    rows = [
        (f"trainer, step 0 ({sent})", f"{reached['before']:.4f}"),
        (f"trainer, step {reached['steps']} ({sent})", f"{reached['after']:.4f}"),
        (f"trainer, step {reached['steps']} (exact messages, float32)", f"{reached['exact']:.4f}"),
        (f"transformers, step {reached['steps']} (exported, float32)", f"{reached['transformers']:.4f}"),
        ("difference of the last two", f"{reached['difference']:.1e}"),
    ]
    same = "the same" if reached["answer"] == reached["answer_transformers"] else "another"
    return [
        f"{reached['model']} at dp {reached['dp']} x tp {reached['tp']}, {reached['tokens']} validation tokens.",
        "",
        "| who | validation loss (nats per token) |",
        "|---|---|",
        *(f"| {who} | {value} |" for who, value in rows),
        "",
        f"Prompt `{reached['prompt']}`; the server, from the run: {quoted(reached['answer'])}; transformers, from the "
        f"exported folder: {same}" + (f", {quoted(reached['answer_transformers'])}." if same == "another" else "."),
    ]


def quoted(text: str) -> str:
    return f"`{json.dumps(text, ensure_ascii=False)}`"


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder or .gguf file; default: a tiny random model")
    parser.add_argument("--text", type=Path, help="file or folder of text that prepare reads; default: the packaged")
    parser.add_argument("--out", type=Path, default=Path("runs/own_text"), help="folder for everything; must be new")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--devices", default=None, help="gpu or cpu:N; default: as many emulated ones as the mesh has")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compression", default="taco", help="codec, or FORWARD:BACKWARD, or none")
    parser.add_argument("--compute-dtype", default="bfloat16", help="type of activations in training")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: 1e-4, of the tiny model 3e-3")
    parser.add_argument("--validation", type=float, default=0.05, help="share of the documents that is held out")
    parser.add_argument("--evaluation-batches", type=int, default=None, help="validation batches; default: all")
    parser.add_argument("--end-token", default=None, help="token after each document; default: the tokenizer's own")
    parser.add_argument("--prompt", default="It is a truth ")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--results", type=Path, default=None, help="folder for the table, with hardware and command")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    for key in ("dp", "tp", "global_batch", "sequence_length", "answer_tokens"):
        runs.require(getattr(args, key) > 0, f"--{key.replace('_', '-')}", getattr(args, key), "must be above 0")
    runs.require(args.steps > 1, "--steps", args.steps, "must be above 1")
    for key in ("model", "text"):
        path = getattr(args, key)
        runs.require(path is None or path.exists(), f"--{key}", path, "is not there; name one that is")
    new = not args.out.is_dir() or not any(args.out.iterdir())
    runs.require(new, "--out", args.out, "is there and not empty; name a new folder, or remove it")
    runs.packages(*PACKAGES, install=INSTALL)
    args.devices = args.devices or f"cpu:{args.dp * args.tp}"
    args.learning_rate = args.learning_rate or (1e-4 if args.model else 3e-3)
    runs.folder("--out", args.out)
    text, model = args.text or args.out / "texts", args.model or args.out / "model"
    if args.text is None:
        write_texts(text)
    if args.model is None:
        write_model(model, pages())
    reached = steps_of(args, text, model)
    lines = table(reached)
    cli.say("\n" + "\n".join(lines))
    if args.results is not None:
        runs.folder("--results", args.results)
        head = runs.header("Own text and weights, from jsonl to a server", args.commit)
        (args.results / "README.md").write_text("\n".join([*head, *lines]) + "\n")
        (args.results / "summary.json").write_text(json.dumps(reached, indent=1, ensure_ascii=False) + "\n")
        shutil.copyfile(args.out / "run" / "metrics.jsonl", args.results / "metrics.jsonl")
    same = reached["difference"] <= LIMIT and reached["answer"] == reached["answer_transformers"]
    if not same:
        cli.say(f"error: losses differ by more than {LIMIT}, or answers differ", sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(cli.run(main))
