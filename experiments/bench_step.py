"""The training step with several codecs in turn, in one process: what compression gains of what sending costs.

    python experiments/bench_step.py --config experiments/qwen7b.py --out experiments/results/step

Compiles the trainer's step once for each variant, then runs a few steps of each, one variant after the other, round by
round, from one set of parameters; other flags go to the trainer. `free` is the exact program without its messages
(free_communication.py). With (t_none - t) / (t_none - t_free) a table says which share of the time that messages cost
a variant saves. The link is the machine's; NCCL_P2P_DISABLE=1 before the command gives another one.

variants  name[:chains[:link]]: a codec of the trainer's, `none` or `free`; chains 1 and link auto unless said; as the
          link `product` is auto, with sums in the kernels of their products, and `pieces` is auto with the mlp's sum
          copied in two pieces, one beside the other's product. FORWARD/BACKWARD as name or link gives the directions
          one each, such as taco/none, taco:1:auto/copy or taco:1:auto/auto, which copies nothing
output    OUT/README.md (hardware, commit, command, table), OUT/summary.json; with --profile the kernels of so many
          steps of each variant, by kind (kernel_times.py) in both and one by one in OUT/kernels-VARIANT.csv
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import free_communication
import jax
import jax.numpy as jnp
import kernel_times
import runs

from pallas_kernels.nvlink import hardware
from taco_jax.compression.compression import LINKS
from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.config.checks import check
from taco_jax.mesh import make_mesh
from taco_jax.train import links, step

# Steps before the first that counts: allocation, the first collectives.
WARM_UP = 2
# Steps of each round that do not count. At full load an H200 lowers its clock within 60 ms, and a variant that waits
# for messages leaves the next one a higher clock.
SETTLE = 1
# In the place of a link.
PRODUCT = "product"
PIECES = "pieces"


@dataclasses.dataclass(frozen=True)
class Variant:
    """As given on the command line, and what it says."""

    given: str
    name: str
    chains: int
    link: str

    @property
    def flags(self) -> list[str]:
        codec = "none" if self.name == "free" else self.name.replace("/", ":")
        forward, _, backward = self.link.partition("/")
        link = ["--compression.link", "auto" if forward in (PRODUCT, PIECES) else forward]
        link += ["--compression.backward-link", backward] if backward else []
        product = f"--compression.{'' if forward == PRODUCT else 'no-'}with-product"
        return [*runs.codec_flags(codec), "--chains", str(self.chains), *link, product]


def parse(text: str) -> list[Variant]:
    """--variants, `none` and `free` among them. Raises ConfigError."""
    variants = []
    for given in text.split(","):
        name, chains, link, *more = [*given.split(":"), *("1", "auto")[given.count(":") :]]
        for codec in name.split("/", 1):
            runs.codecs(codec, pairs=False, more=["free"])
        (count,) = runs.numbers("--variants (chains)", chains, 1)
        for one in link.split("/", 1):
            runs.choices("--variants (link)", one, (*LINKS, PRODUCT, PIECES))
        runs.require(not more, "--variants", repr(given), "must be name:chains:link")
        variants.append(Variant(given, name, count, link))
    names = [v.given for v in variants]
    runs.require({"none", "free"} <= set(names), "--variants", text, "must have none and free to compare with")
    runs.require(len(set(names)) == len(names), "--variants", text, "must name each variant once")
    return variants


@dataclasses.dataclass
class Compiled:
    """A variant's step, and its state of the sites' scales; parameters are common to all."""

    program: step.Program
    step: Any
    scales: Any
    seconds: list[float] = dataclasses.field(default_factory=list)
    times: kernel_times.Times | None = None

    def run(self, state, batch, steps: int):
        """(seconds a step, the state after so many)."""
        state = dataclasses.replace(state, scales=self.scales)
        start = time.perf_counter()
        for _ in range(steps):
            state, metrics = self.step(state, batch)
        jax.block_until_ready(metrics)
        seconds = (time.perf_counter() - start) / steps
        self.scales = state.scales
        return seconds, state


@contextlib.contextmanager
def in_pieces(on: bool):
    """The mlp's sums of steps that are built inside of it are copied in pieces, where that can be, or are not."""
    before, links.PIECES = links.PIECES, on
    try:
        yield
    finally:
        links.PIECES = before


def compiled(config: TrainConfig, mesh, variant: Variant) -> Compiled:
    left_out = free_communication.messages_left_out if variant.name == "free" else contextlib.nullcontext
    with left_out(), in_pieces(variant.link == PIECES or links.PIECES):
        program = step.build(config, mesh)
        return Compiled(program, program.step, program.init_scales())


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", default="none,free,taco,int6h,int4h")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=4)
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="trace so many steps of each variant")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args, flags = parser.parse_known_args(arguments)
    variants = parse(args.variants)
    runs.require(args.rounds >= 1, "--rounds", args.rounds, "must be at least 1")
    runs.require(args.steps_per_round >= 1, "--steps-per-round", args.steps_per_round, "must be at least 1")
    runs.require(args.profile >= 0, "--profile", args.profile, "must be at least 0")
    runs.file("--config", Path(args.config), "name an experiment, such as experiments/qwen7b.py")
    own = {"chains": "a variant has its own: name:chains:link"}
    own |= {f"compression.{key}": "likewise" for key in ("link", "backward-link", "with-product")}
    config = runs.experiment(args.config, flags, own, validated=False)
    configs = {v: check(cli.parse(["--config", args.config, *v.flags, *flags])) for v in variants}
    runs.folder("--out", args.out)
    cli.select_devices(config.devices, deterministic=config.deterministic, in_order=max(v.chains for v in variants) > 1)
    try:
        mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.tp)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    measure(args, config, configs, mesh)


def measure(args, config: TrainConfig, configs: dict[Variant, TrainConfig], mesh) -> None:
    """Measures the steps, writes the report, and writes it again with the kernels where they are traced."""
    programs = {}
    for variant, config in configs.items():
        start = time.perf_counter()
        programs[variant] = compiled(config, mesh, variant)
        print(f"compiled {variant.given} in {time.perf_counter() - start:.0f} s", flush=True)
    first = next(iter(programs.values())).program
    shape = first.batch_shapes["tokens"]
    tokens = jax.random.randint(jax.random.key(1), shape.shape, 0, first.config.model.vocab_size, jnp.int32)
    batch = {"tokens": jax.device_put(tokens, shape.sharding)}
    state = first.init(jax.random.key(0))
    for program in programs.values():
        _, state = program.run(state, batch, WARM_UP)
    for _ in range(args.rounds):
        for program in programs.values():
            _, state = program.run(state, batch, SETTLE)
            seconds, state = program.run(state, batch, args.steps_per_round)
            program.seconds.append(seconds)
    write(args, config, programs)
    if args.profile:
        for variant, program in programs.items():
            kept = [state]

            def traced(program=program, kept=kept):
                _, kept[0] = program.run(kept[0], batch, args.profile)

            listing = args.out / f"kernels-{variant.given.replace(':', '-').replace('/', '-')}.csv"
            program.times = kernel_times.traced(traced, args.profile, listing)
            state = kept[0]
        write(args, config, programs)


def summarise(seconds: dict[str, list[float]]) -> dict[str, dict]:
    """Medians over rounds, fastest and slowest, and the share of what messages cost that a variant saves."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    cost = medians["none"] - medians["free"]
    return {
        name: {
            "ms": 1e3 * medians[name], "fastest_ms": 1e3 * min(times), "slowest_ms": 1e3 * max(times),
            "speedup": medians["none"] / medians[name],
            "saved": (medians["none"] - medians[name]) / cost if cost > 0 else None,
        }
        for name, times in seconds.items()
    }  # fmt: skip


def table(results: dict[str, dict], tokens: int) -> str:
    lines = [
        f"| step of {tokens:,} tokens | ms (median) | fastest, slowest ms | times as fast as `none` | saved of what "
        "messages cost |",
        "|---" * 5 + "|",
    ]
    for name, r in results.items():
        saved = "n/a" if r["saved"] is None else f"{r['saved']:.0%}"
        spread = f"{r['fastest_ms']:.1f}, {r['slowest_ms']:.1f}"
        lines.append(f"| {name} | {r['ms']:.1f} | {spread} | {r['speedup']:.3f}x | {saved} |")
    return "\n".join(lines)


def write(args, config: TrainConfig, programs: dict[Variant, Compiled]) -> None:
    results = summarise({v.given: p.seconds for v, p in programs.items()})
    text = table(results, config.global_batch * config.data.sequence_length)
    times = {v.given: p.times for v, p in programs.items() if p.times is not None}
    for name, found in times.items():
        results[name]["profile"] = dataclasses.asdict(found)
    if times:
        text += "\n\n" + "\n".join(kernel_times.table(times))
    print(text, flush=True)
    linked = hardware.missing(jax.devices()[0].device_kind) or "NVLink"
    report = [
        *runs.header(f"{Path(args.config).stem}: one step, codecs in turn", args.commit),
        f"link: {linked}. Mesh: dp {config.mesh.dp}, pp {config.mesh.pp}, tp {config.mesh.tp}. {args.rounds} rounds of "
        f"{args.steps_per_round} steps of each variant behind {SETTLE} that does not count; `name:chains:link`. `free` "
        "sends nothing: no variant can be faster, and ranks that send nothing do not wait for each other either.",
        "",
        text,
    ]
    runs.write(args.out, report, results)


if __name__ == "__main__":
    sys.exit(cli.run(main))
