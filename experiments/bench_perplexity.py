"""Measures what each codec costs a pretrained model: perplexity on held-out text with sums over its ranks compressed.

    python experiments/bench_perplexity.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text val.jsonl.xz \
        --out experiments/results/perplexity_smollm2

--text is lines of JSON with the keys "src" and "text" (xz or plain): of the --sources with the longest held-out texts,
one window of --context tokens each. Every codec sees the same windows and is paired with the exact model token by
token. Schemes beside the presets are in SCHEMES below; only those whose names say so have error feedback. What OUT has
is kept, so a table is made in as many goes as there is time for (the exact model is run in each); `--only` names codecs
and schemes.

output     OUT/README.md (hardware, commit, command, table), OUT/summary.json
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import runs

from taco_jax.codec import CODECS
from taco_jax.compression.compression import Compression
from taco_jax.config import ConfigError, cli

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from taco_jax.inference.loading import Checkpoint


class Scheme(NamedTuple):
    codec: str
    plan: dict[str, str] = {}
    feedback: bool = False


# For a model of 30 layers. In `mixed` six sites have 6 bits: those whose 4 bits moved the next token's distribution
# most when they alone were compressed.
MIXED = Scheme(
    "mxfp4,block=16,scale=ue5m3",
    {
        "layers/[012]/attn/out": "int6h,scale=ue5m3",
        "layers/0/mlp/down": "int6h,scale=ue5m3",
        "layers/2[89]/mlp/down": "int6h,scale=ue5m3",
        "layers/attn/out": "int4h,block=32,scale=ue5m3",
    },
)
WITHOUT = {"int4h_16": Scheme("int4h,block=16,scale=ue5m3"), "fp4_16": Scheme(MIXED.codec), "mixed": MIXED}
FED = {name: Scheme(name) for name in ("taco", "mxint8", "int6h", "int5h", "int4h", "mxfp4")} | WITHOUT
SCHEMES = WITHOUT | {f"{name}_feedback": scheme._replace(feedback=True) for name, scheme in FED.items()}
FEEDBACK = (
    "`_feedback`: each sum takes along what the one before it lost; SNR of what is then sent. What the last one loses "
    "is added exactly, as generating does for a prompt's last position; that message is not in `times fewer bytes`."
)
HEAD = (
    "| codec | times fewer bytes | bits, attn/out | bits, mlp/down | SNR (dB) attn/out | mlp/down | perplexity "
    "| change | standard error | same token |"
)


def held_out(path: Path) -> dict[str, str]:
    """Returns {source: its held-out text}, the longest first."""
    texts: dict[str, str] = {}
    with (lzma.open if path.suffix == ".xz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            piece = json.loads(line)
            texts[piece["src"]] = texts.get(piece["src"], "") + piece["text"] + "\n\n"
    return {source: texts[source] for source in sorted(texts, key=lambda source: -len(texts[source]))}


def windows(path: Path, sources: int, context: int, encode) -> list[int]:
    """Token ids: `context` of each source, one after the other, and one more to predict."""
    texts = held_out(path)
    longest = sorted(list(texts)[:sources])
    ids = [encode(texts[source][: 20 * context]) for source in longest]
    short = [source for source, of in zip(longest, ids) if len(of) < context]
    runs.require(not short, "--sources", sources, f"{', '.join(short)} has fewer than {context} tokens; take fewer")
    return [token for of in ids for token in of[:context]] + ids[0][:1]


def table(results: dict[str, dict]) -> list[str]:
    lines = [HEAD, "|---" * 10 + "|"]
    for name, r in results.items():
        measured = [r["sites"].get(f"layers/{site}", {}) for site in ("attn/out", "mlp/down")]
        bits = [f"{m['bits']:.2f}" if m else "" for m in measured]
        snr = [f"{m['snr_db']:.1f}" if m else "" for m in measured]
        of_exact = [f"{r['change']:+.2%}", f"{r['error']:.2%}", f"{r['agreement']:.1%}"] if r["sites"] else ["", "", ""]
        cells = [
            f"`{name}`",
            f"{r['ratio']:.2f}" if r["sites"] else "",
            *bits,
            *snr,
            f"{r['perplexity']:.2f}",
            *of_exact,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(out: Path, results: dict[str, dict], args) -> None:
    exact = results["none"]
    lines = runs.header("Perplexity of a pretrained model with compressed sums, by codec", args.commit)
    lines += [
        f"`{Path(args.model).name}`, tp {args.tp}, {args.dtype}: {exact['tokens']} tokens of held-out text in windows "
        f"of {args.context}, one of each of {args.sources} sources. Every sum after a row-parallel product is "
        "compressed, those of the embedding and the logits are exact. Change: of the perplexity against exact sums, "
        "with its standard error over tokens, paired. Same token: both models hold the same id most likely.",
        "",
        *table(results),
    ]
    for name, scheme in WITHOUT.items():
        if name in results:
            rules = ", ".join(f"`{pattern}` {value}" for pattern, value in scheme.plan.items())
            lines += ["", f"`{name}` is {rules + ', the others ' if rules else ''}{scheme.codec}."]
    if any(scheme.feedback and name in results for name, scheme in SCHEMES.items()):
        lines += ["", FEEDBACK]
    (out / "README.md").write_text("\n".join(lines) + "\n")
    (out / "summary.json").write_text(json.dumps(results, indent=1) + "\n")


def opened(args: argparse.Namespace) -> tuple[Checkpoint, Mesh]:
    """Returns the model of --model, which has a tokenizer, and the mesh, once the flags beside it are checked."""
    for key in ("tp", "context", "sources"):
        runs.require(getattr(args, key) > 0, f"--{key}", getattr(args, key), "must be above 0")
    runs.file("--text", args.text, "lines of JSON with src and text")
    runs.folder("--out", args.out)
    cli.select_devices(args.devices)
    cli.devices(args.devices)
    from taco_jax.inference.loading import open_checkpoint
    from taco_jax.inference.text import missing_tokenizer
    from taco_jax.mesh import make_mesh

    checkpoint = open_checkpoint(args.model)
    if checkpoint.tokenizer is None:
        raise ConfigError(missing_tokenizer(checkpoint.path))
    return checkpoint, make_mesh(tp=args.tp)


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=None, help="codecs and schemes, comma-separated; default: all")
    parser.add_argument("--tp", type=int, default=3)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--sources", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--devices", default="cpu:3")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    known = [*CODECS, *SCHEMES]
    names = known if args.only is None else runs.choices("--only", args.only, known)
    checkpoint, mesh = opened(args)
    from taco_jax.inference.evaluate import describe, line
    from taco_jax.inference.loading import load_params
    from taco_jax.inference.perplexity import Evaluation
    from taco_jax.inference.settings import Settings

    ids = windows(args.text, args.sources, args.context, checkpoint.tokenizer.encode)
    params = load_params(checkpoint, mesh, args.dtype)
    evaluation = Evaluation(checkpoint.config, mesh, params, ids, args.context)
    kept = args.out / "summary.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    exact = None
    for name in ["none", *names]:
        if exact is not None and name in results:
            continue
        codec, plan, fed = SCHEMES.get(name, Scheme(name))
        compression = Compression(codec, min_bytes=0, error_feedback=fed)
        score = evaluation.score(Settings(args.tp, compression, plan, args.dtype))
        exact = exact or score
        results[name] = describe(score, exact) | {"tp": args.tp, "context": args.context}
        print(line(name, results[name]), flush=True)
        report(args.out, {n: results[n] for n in known if n in results}, args)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
