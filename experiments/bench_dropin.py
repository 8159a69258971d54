"""Programs of others under the compiler hook with several codecs in turn, in one process: what the drop-in gains.

    NCCL_P2P_DISABLE=1 python experiments/bench_dropin.py --programs stack,maxtext --out experiments/results/dropin_host
    python experiments/bench_dropin.py --devices cpu:2 --layers 2 --width 128 --hidden 256 --heads 4 --kv-heads 2 \\
        --head-dim 32 --vocabulary 512 --tokens 256 --sequence 64 --min-bytes 0 --out OUT

Compiles a program's own step once for each variant (client_programs.py), `none` without the hook. Each variant takes
--loss-steps steps from a copy of one first state; then all of them take a few steps in turn, round by round, from a
state that they hand on, for they take its memory over. The link is the machine's; NCCL_P2P_DISABLE=1 before the command
gives another one. The second command checks the program without a GPU. The same shape in our own trainer:

    python experiments/bench_step.py --config experiments/qwen7b.py --mesh.tp 2 --model.n-layers 6 \\
        --model.vocab-size 32000 --variants none,free,int8h,int6h,int4h --out OUT

variants  codec[:link[:chunks]] of the hook's plan, link auto and chunks as tuned unless said, or `none`
output    OUT/README.md (hardware, commit, command, a table for each program; --collectives: those of the compiled
          programs; --profile: kernels by kind), OUT/summary.json
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import client_programs
import hlo_collectives
import jax
import kernel_times
import runs

import taco_jax
from pallas_kernels.nvlink import hardware
from taco_jax.compression import tuned
from taco_jax.compression.compression import LINKS, MAX_CHUNKS, Compression
from taco_jax.config import cli

EXACT = "none"
# Steps before the first that counts: allocation, the first collectives.
WARM_UP = 2


def parse(text: str) -> dict[str, Compression | None]:
    """--variants as {as given: what the plan says}, None for `none`."""
    variants: dict[str, Compression | None] = {}
    for given in text.split(","):
        name, link, chunks, *more = [*given.split(":"), *("auto", "0")[given.count(":") :]]
        runs.codecs(name, pairs=False)
        runs.choices("--variants (link)", link, LINKS)
        (count,) = runs.numbers("--variants (chunks)", chunks, 0)
        good = not more and count <= MAX_CHUNKS and (name != EXACT or given == EXACT)
        runs.require(good, "--variants", repr(given), f"must be codec:link:chunks, up to {MAX_CHUNKS} chunks, or none")
        variants[given] = None if name == EXACT else Compression(name, link=link, chunks=count or None)
    runs.require(EXACT in variants, "--variants", text, "must have none to compare with")
    runs.require(len(variants) == text.count(",") + 1, "--variants", text, "must name each variant once")
    return variants


def sized(parser, arguments: Sequence[str]):
    """Flags of a `Size`, and the rest."""
    for field in dataclasses.fields(client_programs.Size):
        if field.name != "steps":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    args = parser.parse_args(arguments)
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(client_programs.Size) if f.name != "steps"}
    for name, value in values.items():
        runs.require(value >= 1, f"--{name.replace('_', '-')}", value, "must be at least 1")
    whole = args.tokens % args.sequence == 0
    runs.require(whole, "--tokens", args.tokens, f"must be a multiple of --sequence {args.sequence}")
    return args, client_programs.Size(**values, steps=args.loss_steps)


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--programs", default="stack", help=f"of {', '.join(client_programs.PROGRAMS)}")
    parser.add_argument("--variants", default="none,int8h,int6h,int4h")
    parser.add_argument("--min-bytes", type=int, default=None, help="smaller messages stay exact; as tuned by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=4)
    parser.add_argument("--loss-steps", type=int, default=12)
    again = "compile `none` twice; the first time XLA also chooses the kernels of matrix products, for all variants"
    parser.add_argument("--compile-again", action="store_true", help=again)
    parser.add_argument("--collectives", action="store_true", help="list those of the compiled programs")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="trace so many steps of each variant")
    parser.add_argument("--devices", default=None, help="cpu:2 emulates two devices")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, size = sized(parser, arguments)
    variants = parse(args.variants)
    names = runs.choices("--programs", args.programs, client_programs.PROGRAMS)
    for key, least in (("rounds", 1), ("steps_per_round", 1), ("loss_steps", 1), ("profile", 0), ("min_bytes", 0)):
        value = getattr(args, key)
        runs.require(value is None or value >= least, f"--{key.replace('_', '-')}", value, f"must be at least {least}")
    cli.select_devices(args.devices)
    ranks = len(cli.devices(args.devices))
    runs.require(ranks > 1, "devices", ranks, "a sum needs at least 2; --devices cpu:2 emulates two")
    for key, value in (("--hidden", size.hidden), ("--heads", size.heads), ("--kv-heads", size.kv_heads)):
        runs.require(value % ranks == 0, key, value, f"must be a multiple of the {ranks} devices")
    runs.folder("--out", args.out)
    report = Report(args, size, variants)
    for name in names:
        measure(client_programs.PROGRAMS[name](size), variants, args, functools.partial(report.write, name))


@dataclasses.dataclass
class Compiled:
    """A variant's step, what the hook did to it, and what was measured of it.

    compile_seconds: of tracing, lowering and compiling; of each compilation.
    """

    step: Any
    report: Any
    compile_seconds: list[float]
    sent: list[hlo_collectives.Collective]
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    times: kernel_times.Times | None = None


def compiled(client: client_programs.Client, compression: Compression | None, args) -> Compiled:
    """Compiles one variant. Raises what compiling raises."""

    def once():
        with client.scope():
            return client.step.lower(client.state, client.batch).compile()

    seconds, report = [], None
    for _ in range(2 if args.compile_again and compression is None else 1):
        jax.clear_caches()
        start = time.perf_counter()
        if compression is None:
            step = once()
        else:
            options = {"min_bytes": args.min_bytes}
            with taco_jax.compressed({client.axis: compression}, **options) as report:
                step = once()
        seconds.append(time.perf_counter() - start)
    return Compiled(step, report, seconds, hlo_collectives.collectives(step.as_text()))


def measure(
    client: client_programs.Client,
    variants: dict[str, Compression | None],
    args,
    write: Callable[[dict[str, Compiled], str], None],
) -> None:
    """Measures one program, and calls `write` with what has been measured so far. A variant that fails is left out."""
    programs: dict[str, Compiled] = {}
    for given, compression in variants.items():
        try:
            programs[given] = compiled(client, compression, args)
        except Exception as error:  # of compilers and hooks: the other variants are worth their time
            if compression is None:
                raise
            print(f"{given} failed: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            continue
        times = ", ".join(f"{s:.1f} s" for s in programs[given].compile_seconds)
        print(f"compiled {given} in {times}: {hlo_collectives.counts(programs[given].sent)}", flush=True)
    state, batch = client.state, client.batch

    def run(program: Compiled, state, steps: int):
        """(seconds of a step, the state after so many)."""
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = program.step(state, batch)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / steps, state

    for given, program in programs.items():
        own = jax.tree.map(lambda x: x.copy(), state)
        for _ in range(args.loss_steps):
            own, metrics = program.step(own, batch)
            program.losses.append(float(client.loss(metrics)))
        del own
        print(f"{given}: loss {program.losses[0]:.4f}, after {args.loss_steps} {program.losses[-1]:.4f}", flush=True)
    for program in programs.values():
        _, state = run(program, state, WARM_UP)
    for _ in range(args.rounds):
        for program in programs.values():
            seconds, state = run(program, state, args.steps_per_round)
            program.seconds.append(seconds)
    write(programs, client.axis)
    if args.profile:
        for program in programs.values():
            kept = [state]

            def traced(program=program, kept=kept):
                _, kept[0] = run(program, kept[0], args.profile)

            try:
                program.times = kernel_times.traced(traced, args.profile)
            except Exception as error:  # of profilers that a machine does not allow
                print(f"not traced: {type(error).__name__}: {str(error)[:2000]}", flush=True)
            state = kept[0]
        write(programs, client.axis)


def summary(found: dict[str, Compiled], axis: str) -> dict[str, dict]:
    """Numbers by variant. bytes: (before, after) that a device sends over the axis in a step, None without the hook."""
    exact = statistics.median(found[EXACT].seconds)
    results = {}
    for given, program in found.items():
        median = statistics.median(program.seconds)
        report = program.report
        results[given] = {
            "ms": 1e3 * median, "fastest_ms": 1e3 * min(program.seconds), "slowest_ms": 1e3 * max(program.seconds),
            "speedup": exact / median, "share": report.share(axis) if report else 0.0,
            "bytes": report.bytes(axis) if report else None, "collectives": hlo_collectives.counts(program.sent),
            "compile_seconds": program.compile_seconds, "losses": program.losses,
        }  # fmt: skip
        if program.times is not None:
            results[given]["profile"] = dataclasses.asdict(program.times)
    return results


def table(results: dict[str, dict], tokens: int) -> list[str]:
    lines = [
        f"| step of {tokens:,} tokens | ms (median) | fastest, slowest ms | times as fast as `none` | compressed | "
        "bytes sent | collectives in a step | compiled in s | last loss |",
        "|---" * 9 + "|",
    ]
    for name, r in results.items():
        share, sent = (f"{r['share']:.1%}", f"{r['bytes'][1]:,.0f} of {r['bytes'][0]:,.0f}") if r["bytes"] else ("", "")
        seconds = ", then ".join(f"{s:.1f}" for s in r["compile_seconds"])
        spread = f"{r['fastest_ms']:.1f}, {r['slowest_ms']:.1f}"
        lines.append(
            f"| {name} | {r['ms']:.1f} | {spread} | {r['speedup']:.3f}x | {share} | {sent} | {r['collectives']} | "
            f"{seconds} | {r['losses'][-1]:.4f} |"
        )
    return lines


def link() -> str:
    if jax.default_backend() == "cpu":
        return "emulated devices"
    label = tuned.link_label()
    return label if label != "nvlink or pcie p2p" else hardware.missing(jax.devices()[0].device_kind) or "NVLink"


class Report:
    """The output folder, written anew whenever something has been measured."""

    def __init__(self, args, size: client_programs.Size, variants):
        self.args, self.size = args, size
        self.sections: dict[str, list[str]] = {}
        self.results: dict[str, Any] = {}
        self.head = [
            *runs.header("Programs of others under the compiler hook", args.commit),
            f"link: {link()}. {len(jax.devices())} devices, tensor-parallel. {size.layers} layers of {size.width} / "
            f"{size.hidden}. {args.rounds} rounds of {args.steps_per_round} steps of each variant in turn; "
            f"`codec:link:chunks`. The last loss is that after {args.loss_steps} steps from one state. Compressed is a "
            "share of the bytes over the axis; bytes sent are those of one device in a step; collectives those of "
            "1,024 values or more.",
        ]

    def write(self, name: str, found: dict[str, Compiled], axis: str) -> None:
        self.results[name] = summary(found, axis)
        lines = self.sections[name] = ["", f"## {name}", "", *table(self.results[name], self.size.tokens)]
        print("\n".join(lines), flush=True)
        if any(program.times for program in found.values()):
            profile = kernel_times.table({given: program.times for given, program in found.items()})
            lines += ["", "### Kernels", "", *profile]
            print("\n".join(profile), flush=True)
        if self.args.collectives:
            for given, program in found.items():
                lines += ["", f"### Collectives, {given}", "", *hlo_collectives.table(program.sent)]
                if program.report:
                    lines += ["", "```", *str(program.report).splitlines(), "```"]
        text = "\n".join([*self.head, *(line for section in self.sections.values() for line in section)])
        (self.args.out / "README.md").write_text(text + "\n")
        (self.args.out / "summary.json").write_text(json.dumps(self.results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(cli.run(main))
