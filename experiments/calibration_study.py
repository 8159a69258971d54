"""Are plans from data better than codecs everywhere, and do two calibration sets find the same?

    python experiments/calibration_study.py measure --model SmolLM2-135M-Instruct.Q4_1.gguf --corpus corpus --out OUT
    python experiments/calibration_study.py perplexity --model ... --text corpus/val.jsonl.xz --out OUT
    python experiments/calibration_study.py confirm --model ... --text corpus/val.jsonl.xz --out OUT
    python experiments/calibration_study.py quickstart --out OUT
    python experiments/calibration_study.py training --out OUT
    python experiments/calibration_study.py report --out OUT

measure     a pretrained model at tp 3 on two sets of training texts (of each source one window from two places, none of
            it held out): how much each site's errors are felt, by layer, and the plans of --bits and --loss of the
            first set; what the measurement predicts for codecs everywhere, which experiments/results/perplexity_smollm2
            has measured
perplexity  the plans on the held-out windows of bench_perplexity.py, paired with the exact model token by token, with
            error feedback (--only names plans; what OUT has is kept)
confirm     the plans, and codecs everywhere, on held-out text that nothing was chosen on: the next --more windows of
            the same sources, a window of each other source (--only: plans; --schemes: those of bench_perplexity.py)
quickstart  the quickstart, trained a few steps, calibrated on two sets of its text: the plan of --training-bits
training    the quickstart with that plan (way `plan`), with the plan of `calibrate --feedback on`, whose forward sums
            take along what the ones before lost (`plan_feedback`), with int6h and exact, paired seeds (--seeds, --ways;
            what OUT has is kept). Other flags go to the trainer: --mesh.dp 1 --mesh.tp 2 --devices gpu takes two GPUs
join        the trainings of the folders --parts, which were made side by side, as those of OUT
report      OUT/README.md of what is there

Every part keeps its results in OUT/summary.json and writes the report. `--tokens` and `--length` make the sets smaller.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs
from bench_perplexity import SCHEMES, held_out, windows
from calibration_study_report import compared, rank_correlation, write_report

from taco_jax.compression import plan_file
from taco_jax.config import ConfigError, cli
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh

SOURCES = ("dict_gcide", "linux_doc", "speech_sotu", "wordnet", "lit_austen", "lit_shakespeare", "anarchism")
RECORD = Path(__file__).with_name("results") / "perplexity_smollm2" / "summary.json"
PLAN, FED_PLAN = "plan_quickstart.json", "plan_quickstart_feedback.json"
FED_COMMAND = (
    "python -m taco_jax.calibrate --config experiments/quickstart.py --devices cpu:8 --bits 5 --feedback on "
    f"--steps 100 --out OUT/{FED_PLAN}"
)
QUICKSTART = str(Path(__file__).with_name("quickstart.py"))
# Codecs of the record that are candidates too: name there, candidate, with feedback.
RECORDED = [
    (f"{name}{end}", codec, bool(end))
    for name, codec in (
        ("int8h", "int8h"), ("int6h", "int6h"), ("int5h", "int5h"), ("int4h", "int4h"), ("mxfp4", "mxfp4"),
        ("int4h_16", "int4h,block=16,scale=ue5m3"), ("fp4_16", "mxfp4,block=16,scale=ue5m3"),
    )
    for end in ("", "_feedback")
]  # fmt: skip


def texts(folder: Path, sources: Sequence[str], part: int, characters: int) -> list[str]:
    """A stretch of each source's training text, from a place that depends on the part."""
    out = []
    for source in sources:
        path = runs.file("--corpus", folder / f"{source}.train.txt.xz", "the folder of the corpus")
        with lzma.open(path, "rt", encoding="utf-8") as file:
            file.read((1 + 3 * part) * 100_000)
            text = file.read(characters)
        out.append(text[text.find(" ") + 1 :])
    return out


def measure(args: argparse.Namespace, kept: dict) -> dict:
    from taco_jax.calibration import plans
    from taco_jax.calibration.command import Budget, Subject, plan_of
    from taco_jax.calibration.measure import Model
    from taco_jax.calibration.measure import measure as run
    from taco_jax.inference.loading import load_params, open_checkpoint
    from taco_jax.inference.settings import ROWS, Settings

    checkpoint, mesh = open_checkpoint(args.model), make_mesh(tp=args.tp)
    config, length = checkpoint.config, args.length
    layout = Settings(args.tp, dtype="float32").layout(config, mesh.devices.flat[0], decoding=False)
    model = Model(config, load_params(checkpoint, mesh, "float32"), mesh, layout.par)
    sites = [f"layers/{row}" for row in ROWS]
    found, batches = [], []
    for part, labels in ((0, "model"), (1, "model"), (0, "text")):
        path = None if args.measured is None else runs.folder("--measured", args.measured) / f"{labels}-{part}.pickle"
        ids = [checkpoint.tokenizer.encode(t)[: length + 1] for t in texts(args.corpus, SOURCES, part, 20 * length)]
        batches = [np.array([of]) for of in ids[: args.batches]]
        if path is not None and path.is_file():
            found.append(pickle.loads(path.read_bytes()))
            continue
        options = {"sites": sites, "feedback": True, "gradients": False, "labels": labels, "exponent": 0, "say": print}
        found.append(run(model, batches, plans.CANDIDATES, **options))
        if path is not None:
            path.write_bytes(pickle.dumps(found[-1]))
    (first, loss), (second, _), (by_text, _) = found
    both = [plans.by_layer(statistics) for statistics in (first, second)]
    felt = {
        f"{site}{' with feedback' if fed else ''}": [of[site, d].sensitivity(fed) for of in both]
        for site, d in both[0]
        for fed in (False, True)
    }
    flat = [key for key in felt if not key.endswith("feedback")]
    correlation = lambda keys: rank_correlation(*zip(*(felt[key] for key in keys)))
    last = f"layers/{config.n_layers - 1}/mlp/down"
    predicted: dict[str, dict[str, float]] = {}
    of_text = plans.by_layer(by_text)
    for name, codec, fed in RECORDED:
        at = plans.CANDIDATES.index(codec)
        for key, by, measured in (
            ("element", "diagonal", both[0]), ("token", "product", both[0]), ("text", "diagonal", of_text),
        ):  # fmt: skip
            rise = [of.rises(fed, by)[:, at].mean() for (site, _), of in measured.items() if not (fed and site == last)]
            predicted.setdefault(name, {})[key] = math.expm1(sum(rise))
    record = json.loads(RECORD.read_text())
    subject = Subject(
        model, "first_token", tuple(f"layers/{row}" for row in ROWS), checkpoint.tokenizer, feedback=True,
        by_layer=True, data="corpus", length=length, elements=length * config.d_model,
    )  # fmt: skip
    name_of = lambda kind, value: f"{kind}_{value:g}".replace(".", "_")
    budgets = {name_of("bits", bits): Budget("bits", bits, f"{bits:g} bits") for bits in args.bits}
    budgets |= {name_of("loss", share): Budget("loss", share / 100, f"{share:g}% loss") for share in args.loss}
    out = {}
    for name, budget in budgets.items():
        tokens = sum(batch.shape[1] - 1 for batch in batches)
        made = {"command": "experiments/calibration_study.py", "use": "first_token", "budget": budget.text}
        try:
            options = {"forecast": None, "made": made | {"data": "corpus", "tokens": tokens}}
            plan, _ = plan_of(first, loss, subject, budget, plans.CANDIDATES, **options)
        except ConfigError as error:
            print(f"{name}: {error}")
            continue
        plan_file.write(plan, args.out / f"plan_{name}.json")
        out[name] = {key: plan.made[key] for key in ("bits", "predicted_rise")}
        out[name]["predicted"] = math.expm1(plan.made["predicted_rise"])
    return {
        "loss": loss,
        "tokens": sum(batch.shape[1] - 1 for batch in batches),
        "rank_correlation": correlation(flat),
        "rank_correlation_with_feedback": correlation([key for key in felt if key.endswith("feedback")]),
        "sensitivity": felt,
        "predicted": predicted,
        "plans": out,
        "record": {name: record[name]["change"] for name in predicted if name in record},
    }


def perplexity(args: argparse.Namespace, kept: dict) -> dict:
    """The plans on held-out text, beside the exact model."""
    from taco_jax.compression.compression import Compression
    from taco_jax.inference.evaluate import describe, line
    from taco_jax.inference.loading import load_params, open_checkpoint
    from taco_jax.inference.perplexity import Evaluation
    from taco_jax.inference.settings import Planned, Settings

    checkpoint, mesh = open_checkpoint(args.model), make_mesh(tp=args.tp)
    ids = windows(args.text, args.sources, args.context, checkpoint.tokenizer.encode)
    params = load_params(checkpoint, mesh, "float32")
    evaluation = Evaluation(checkpoint.config, mesh, params, ids, args.context)
    exact = evaluation.score(Settings(args.tp, dtype="float32"))
    print(line("none", describe(exact, exact)), flush=True)
    results = dict(kept)
    found = sorted(path.stem.removeprefix("plan_") for path in args.out.glob("plan_*.json"))
    for name in found if args.only is None else runs.choices("--only", args.only, found):
        if name in results or name == "quickstart":
            continue
        plan = plan_file.read(args.out / f"plan_{name}.json")
        settings = Settings(args.tp, Planned(plan, Compression("none", min_bytes=0)), {}, "float32")
        score = evaluation.score(settings)
        results[name] = describe(score, exact) | {"context": args.context, "sources": args.sources}
        for site in results[name]["sites"].values():
            site.pop("snr_db_by_layer", None)
        print(line(name, results[name]), flush=True)
        save(args, "perplexity", results)
    return results


def other_windows(path: Path, sources: int, more: int, context: int, encode: Callable) -> dict[str, list[list[int]]]:
    """Returns windows of held-out text that `windows` does not have: `next`, the following ones of each of its sources,
    and `others`, the first of each other source that has one."""
    texts = held_out(path)
    longest, others = list(texts)[:sources], list(texts)[sources:]
    found: dict[str, list[list[int]]] = {"next": [], "others": []}
    for source in sorted(longest):
        ids = encode(texts[source][: 20 * context * (1 + more)])
        rule = f"{source} has fewer than {1 + more} windows of {context} tokens; take fewer"
        runs.require(len(ids) >= context * (1 + more), "--more", more, rule)
        found["next"] += [ids[context * i : context * (i + 1)] for i in range(1, 1 + more)]
    for source in sorted(others):
        ids = encode(texts[source][: 20 * context])
        if len(ids) >= context:
            found["others"].append(ids[:context])
    return found


def by_window(score: Any, exact: Any, count: int) -> np.ndarray:
    """Returns how much the loss of each of `count` windows rises against the exact model's, nats."""
    return (score.nll.astype(np.float64) - exact.nll).reshape(count, -1).mean(1)


def rise(windows: Sequence[float]) -> dict[str, float]:
    """Returns the change of the perplexity over windows, and its standard error with windows as what is drawn: an error
    reaches the tokens behind it, so that tokens are not independent."""
    of = np.asarray(windows, float)
    error = float(of.std(ddof=1) / math.sqrt(of.size)) if of.size > 1 else math.nan
    return {"change": math.expm1(of.mean()), "error_of_windows": error}


def confirm(args: argparse.Namespace, kept: dict) -> dict:
    """The plans and schemes on windows that neither they nor the method were chosen on."""
    from taco_jax.compression.compression import Compression
    from taco_jax.inference.loading import load_params, open_checkpoint
    from taco_jax.inference.perplexity import Evaluation
    from taco_jax.inference.settings import Planned, Settings

    found = sorted(path.stem.removeprefix("plan_") for path in args.out.glob("plan_*.json"))
    found = [name for name in found if name != "quickstart"]
    plans = found if args.only is None else runs.choices("--only", args.only, found)
    schemes = runs.choices("--schemes", args.schemes, SCHEMES) if args.schemes else []
    checkpoint, mesh = open_checkpoint(args.model), make_mesh(tp=args.tp)
    sets = other_windows(args.text, args.sources, args.more, args.context, checkpoint.tokenizer.encode)
    every = [window for of in sets.values() for window in of]
    ids = [token for window in every for token in window] + every[0][:1]
    evaluation = Evaluation(checkpoint.config, mesh, load_params(checkpoint, mesh, "float32"), ids, args.context)
    exact = evaluation.score(Settings(args.tp, dtype="float32"))
    print(f"exact: loss {exact.loss:.4f}", flush=True)
    results = dict(kept)
    for name in [*plans, *schemes]:
        if name in results:
            continue
        if name in plans:
            planned = Planned(plan_file.read(args.out / f"plan_{name}.json"), Compression("none", min_bytes=0))
            settings = Settings(args.tp, planned, {}, "float32")
        else:
            codec, plan, fed = SCHEMES[name]
            settings = Settings(args.tp, Compression(codec, min_bytes=0, error_feedback=fed), plan, "float32")
        score = evaluation.score(settings)
        results[name] = {"ratio": score.bf16 / score.sent} | parted(score, exact, sets, args.context)
        print(name, {of: {k: round(v, 5) for k, v in r.items() if k != "windows"}
                     for of, r in results[name].items() if of != "ratio"}, flush=True)  # fmt: skip
        save(args, "confirm", results)
    return results


def parted(score: Any, exact: Any, sets: dict[str, list], context: int) -> dict[str, dict]:
    """Returns {set: what a plan costs on its windows}."""
    out, start = {}, 0
    for name, of in sets.items():
        tokens = slice(start * context, (start + len(of)) * context)
        own, base = (dataclasses.replace(s, nll=s.nll[tokens], best=s.best[tokens]) for s in (score, exact))
        rises = by_window(own, base, len(of))
        out[name] = own.against(base) | rise(rises) | {
            "tokens": len(of) * context, "perplexity": own.perplexity, "exact": base.perplexity,
            "windows": [round(float(value), 6) for value in rises],
        }  # fmt: skip
        start += len(of)
    return out


def quickstart(args: argparse.Namespace, kept: dict) -> dict:
    """The quickstart after some steps, calibrated on two sets of its own text."""
    from taco_jax.calibration import plans
    from taco_jax.calibration.batches import batches
    from taco_jax.calibration.command import Budget, _parser, open_subject, plan_of
    from taco_jax.calibration.measure import REFERENCE
    from taco_jax.calibration.measure import measure as run

    own = ["--config", QUICKSTART, "--workdir", str(args.out / "none")]
    options = _parser().parse_args(["--out", "plan.json", "--bits", "5", "--steps", str(args.calibrate_after)])
    subject = open_subject(options, cli.parse(own), "training", has_config=True)
    codecs = plans.CANDIDATES if REFERENCE in plans.CANDIDATES else (*plans.CANDIDATES, REFERENCE)
    found = []
    for part in range(2):
        read = batches(
            "austen", vocab_size=256, tokenizer=None, length=subject.length, tokens=args.tokens, part=part, parts=2
        )
        found.append(run(subject.model, read, codecs, sites=subject.sites, feedback=False, gradients=True, say=print))
    (first, loss), (second, _) = found
    both = [plans.by_layer(statistics) for statistics in (first, second)]
    felt = {f"{s}, {d}": [of[s, d].sensitivity() for of in both] for s, d in both[0] if d == "forward"}
    gradient = {f"{s}, {d}": [float(of[s, d].gradient_sensitivities().mean()) for of in (first, second)]
                for s, d in first}  # fmt: skip
    budget = Budget("bits", args.training_bits, f"{args.training_bits:g} bits")
    made = {"command": "experiments/calibration_study.py", "use": "training", "budget": budget.text, "data": "austen"}
    plan, lines = plan_of(
        first, loss, subject, budget, plans.CANDIDATES, forecast=None, made=made | {"tokens": args.tokens}
    )
    plan_file.write(plan, args.out / PLAN)
    print("\n".join(lines))
    return {
        "steps": args.calibrate_after,
        "loss": loss,
        "rank_correlation": rank_correlation(*zip(*felt.values())),
        "rank_correlation_gradient": rank_correlation(*zip(*gradient.values())),
        "sensitivity": felt,
        "gradient_sensitivity": gradient,
        "bits": plan.made["bits"],
        "plan": {site: f"{of.forward}:{of.backward}" for site, of in plan.sites.items()},
    }


def training(args: argparse.Namespace, kept: dict) -> dict:
    """The quickstart with its plans, with int6h and exact, seed by seed, in one process: a way is compiled once."""
    plans = {"plan": args.out / PLAN, "plan_feedback": args.out / FED_PLAN}
    ways = {"none": ["--compression", "none"], "int6h": ["--compression", "int6h"]}
    ways |= {way: ["--compression.plan", str(path)] for way, path in plans.items()}
    wanted = runs.choices("--ways", args.ways, list(ways))
    makes = "run the part quickstart first", f"make it by {FED_COMMAND}"
    for (way, path), how in zip(plans.items(), makes):
        if way in wanted:
            runs.file("--out", path, how)
    seeds = runs.numbers("--seeds", args.seeds, 0)
    results: dict[str, dict] = {way: dict(kept.get(way, {})) for way in ways}
    configs = {way: check(cli.parse(["--config", QUICKSTART, *ways[way], *args.flags])) for way in wanted}
    first = next(iter(configs.values()))
    cli.select_devices(first.devices, deterministic=first.deterministic)
    cli.devices(first.devices)
    import in_turn  # it makes no devices, but what it imports may

    programs = in_turn.Programs(make_mesh(first.mesh.dp, first.mesh.pp, first.mesh.tp), configs.__getitem__)
    try:
        for seed in map(str, seeds):
            for way in configs:
                if seed in results[way]:
                    continue
                program = programs.get(way, to_train=True)
                records = in_turn.train(int(seed), [(program, program.config.steps)])
                runs.keep(records, args.out / f"{way}-{seed}.jsonl")
                last = records[-1]
                ratio = last["comm_bytes_bf16"] / (last["comm_bytes"] or 1)
                results[way][seed] = {"loss": last["validation_loss"], "ratio": ratio}
                save(args, "training", results)
    finally:
        programs.close()
    return results


def join(args: argparse.Namespace, kept: dict) -> dict:
    """The trainings of several folders. What comes later in --parts goes before what is there."""
    results: dict[str, dict] = {way: dict(by_seed) for way, by_seed in kept.items()}
    for folder in args.parts:
        path = runs.file("--parts", folder / "summary.json", "name folders in which the part training has been run")
        for way, by_seed in json.loads(path.read_text()).get("training", {}).items():
            results.setdefault(way, {}).update(by_seed)
    for way, by_seed in results.items():
        results[way] = {seed: by_seed[seed] for seed in sorted(by_seed, key=int)}
    return results


def save(args: argparse.Namespace, part: str, result: dict) -> None:
    path = args.out / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    summary[part] = result
    if part == "training":
        summary["compared"] = compared(result)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    write_report(args.out, summary, args.commit)


PARTS: dict[str, Callable] = {
    "measure": measure, "perplexity": perplexity, "confirm": confirm, "quickstart": quickstart, "training": training,
}  # fmt: skip
NEEDS = {"measure": ("model", "corpus"), "perplexity": ("model", "text"), "confirm": ("model", "text")}


def main(arguments: Sequence[str]) -> int:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("part", choices=(*PARTS, "join", "report"))
    add("--out", type=Path, required=True)
    add("--model", default=None)
    add("--corpus", type=Path, default=None, help="folder with NAME.train.txt.xz")
    add("--text", type=Path, default=None, help="lines of JSON with src and text")
    add("--tp", type=int, default=3)
    add("--devices", default=None, help="default: cpu:3 for the model, cpu:8 for the quickstart")
    add("--bits", type=float, nargs="*", default=[4.57, 4.12])
    add("--loss", type=float, nargs="*", default=[0.9], help="percent")
    add("--length", type=int, default=512)
    add("--batches", type=int, default=len(SOURCES))
    add("--tokens", type=int, default=8192, help="of a set of the quickstart")
    add("--context", type=int, default=1024)
    add("--sources", type=int, default=7)
    add(
        "--measured",
        type=Path,
        default=None,
        help="of the part measure: folder for each set's result, read where it is",
    )
    add("--more", type=int, default=2, help="of the part confirm: windows of each source")
    add("--only", default=None)
    add("--schemes", default="mixed_feedback,int4h_feedback", help="of the part confirm")
    add("--calibrate-after", type=int, default=100, metavar="STEPS")
    add("--training-bits", type=float, default=5.0)
    add("--seeds", default="0,1,2")
    add("--ways", default="none,int6h,plan", help="of the part training")
    add("--parts", type=Path, nargs="+", default=(), help="of the part join: folders of trainings")
    add("--commit", default=None, help="commit to name where there is no git")
    args, args.flags = parser.parse_known_args(arguments)
    rule = "the part training alone hands flags on to the trainer"
    runs.require(args.part == "training" or not args.flags, "flags", " ".join(args.flags), rule)
    if args.part == "training":
        args.flags += [] if args.devices is None else ["--devices", args.devices]
        own = dict.fromkeys(("compression", "data-parallel.gradients"), "each way has its own")
        runs.experiment(QUICKSTART, args.flags, own | {"seed": "the seeds are those of --seeds"})
    runs.folder("--out", args.out)
    for key in ("tp", "length", "batches", "tokens", "context", "sources", "more", "calibrate_after"):
        runs.require(getattr(args, key) > 0, f"--{key}", getattr(args, key), "must be above 0")
    for key in NEEDS.get(args.part, ()):
        runs.require(getattr(args, key) is not None, f"--{key}", None, f"the part {args.part} needs it")
    path = args.out / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    if args.part == "report":
        write_report(args.out, summary, args.commit)
        return 0
    if args.part == "join":
        save(args, "training", join(args, summary.get("training", {})))
        return 0
    if args.part != "training":
        devices = args.devices or ("cpu:8" if args.part == "quickstart" else f"cpu:{args.tp}")
        cli.select_devices(devices)
        cli.devices(devices)
    save(args, args.part, PARTS[args.part](args, summary.get(args.part, {})))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run(main))
