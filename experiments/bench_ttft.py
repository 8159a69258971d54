"""Time to first token with several codecs in turn, in one process: what compression gains of what sending costs.

    python experiments/bench_ttft.py --out experiments/results/ttft --seconds 540
    NCCL_P2P_DISABLE=1 python experiments/bench_ttft.py --out experiments/results/ttft --seconds 540

The first command is for 4 GPUs joined by NVLink, the second sends through host memory on the same machine; both put
their results into the same folder, each under its link. A shape takes a compilation for each variant: --seconds begins
no further shape after so long, and the same command goes on with those that are missing. `--tp 1 --layers 4 --lengths
512` checks the program on one GPU, `--devices cpu:4` without any.

The model has a preset's sizes and random weights. A sample starts with the prompt's ids on the host, ends when the
chosen tokens are there, and has no compiling in it; the cache has room for the prompt. Each round takes one sample of
every variant, one after the other. What is compressed are the sums after row-parallel products; without --min-bytes
messages that are small for the link go exactly, so run `python -m taco_jax.tune` on both links first. `free` is the
exact program without its messages (free_communication.py), the sum of the embedding with them, which no variant
compresses.

variants  codec[:link[:feedback[:chains]]], the codec as of `taco_jax.generate` (mxfp4, int4h,block=32), `none`
          (bfloat16) or `free`; feedback is fed or plain, with error feedback or without, as `taco_jax.Generator` has it
          if left out; chains 1 unless said
output    OUT/README.md (hardware, commit, commands, tables), OUT/summary.json, OUT/ttft.png; with --profile the
          kernels of a sample of each variant in OUT/kernels-LINK-SHAPE.md, one by one in csv files beside it
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import bench_step
import free_communication
import jax
import kernel_times
import numpy as np
import runs
import ttft_report

from pallas_kernels import KernelUnavailableError
from pallas_kernels.nvlink import hardware
from taco_jax.codec import as_codec
from taco_jax.compression import tuned
from taco_jax.compression.compression import LINKS, Compression
from taco_jax.config import ConfigError, cli
from taco_jax.inference.compiled import Programs
from taco_jax.inference.loading import in_memory, load_params
from taco_jax.inference.sampling import Sampling
from taco_jax.inference.settings import Settings
from taco_jax.mesh import make_mesh
from taco_jax.models.config import validate
from taco_jax.models.presets import PRESETS, preset

VARIANTS = ("none", "free", "taco", "int8h", "int6h", "int4h", "int4h:auto:plain", "mxfp4")
FEEDBACK = {"": None, "fed": True, "plain": False}
WARM_UP = 2  # samples of each variant that are not counted
USABLE = 0.97  # of a device's memory: the rest is fragments


@dataclasses.dataclass(frozen=True)
class Variant:
    """As given on the command line, and what it says."""

    given: str
    codec: str
    link: str
    feedback: bool | None
    chains: int = 1


def parse(given: Sequence[str]) -> list[Variant]:
    """--variants, `none` and `free` among them. Raises ConfigError."""
    variants = []
    for text in given:
        codec, link, feedback, chains = (*text.split(":", 3), "", "", "")[:4]
        (count,) = runs.numbers("--variants (chains)", chains or "1", 1)
        runs.choices("--variants (link)", link or "auto", LINKS)
        runs.require(
            (link, feedback) != ("nvlink", "fed"), "--variants", text, "NVLink kernels keep no errors; use nccl"
        )
        runs.require(feedback in FEEDBACK, "--variants", text, "must have fed or plain, as in int4h:auto:plain")
        if codec != "free":
            try:
                as_codec(codec, "--variants")
            except ValueError as error:
                raise ConfigError(str(error)) from None
        variants.append(Variant(text, codec, link or "auto", FEEDBACK[feedback], count))
    runs.require({"none", "free"} <= set(given), "--variants", " ".join(given), "must have none and free to compare")
    runs.require(len(set(given)) == len(given), "--variants", " ".join(given), "must name each variant once")
    return variants


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen2p5_7b", help="preset of taco_jax.models.presets")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the preset's, for a quick check")
    parser.add_argument("--tp", type=int, default=None, help="tensor-parallel devices; all there are by default")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384", help="tokens of a prompt")
    parser.add_argument("--batches", default="1,2,4,8,16", help="prompts at once")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--min-bytes", type=int, default=None, help="messages below are exact; as tuned by default")
    parser.add_argument("--seconds", type=float, default=None, help="begin no further shape after so long")
    parser.add_argument("--link-name", default=None, help="under which results go; as the environment says by default")
    parser.add_argument("--memory-gb", type=float, default=None, help="of a device; as it says itself by default")
    parser.add_argument("--devices", default=None, help="cpu:4 emulates four devices")
    parser.add_argument("--profile", action="store_true", help="trace a sample of each variant")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    variants = parse(args.variants)
    lengths, batches = runs.numbers("--lengths", args.lengths, 1), runs.numbers("--batches", args.batches, 1)
    runs.require(args.rounds >= 5, "--rounds", args.rounds, "must be at least 5")
    args.seconds = runs.limit("--seconds", args.seconds)
    for key, least in (("tp", 1), ("min_bytes", 0)):
        value = getattr(args, key)
        runs.require(value is None or value >= least, f"--{key.replace('_', '-')}", value, f"must be at least {least}")
    runs.require(args.memory_gb is None or args.memory_gb > 0, "--memory-gb", args.memory_gb, "must be above 0")
    runs.choices("--model", args.model, PRESETS)
    config = preset(args.model)
    if args.layers is not None:
        valid = 1 <= args.layers <= config.n_layers
        runs.require(valid, "--layers", args.layers, f"must be from 1 to the preset's {config.n_layers}")
        config = dataclasses.replace(config, n_layers=args.layers)
    cli.select_devices(args.devices, in_order=max(v.chains for v in variants) > 1)
    tp = args.tp or len(cli.devices(args.devices))
    try:
        validate(config, tp)
        mesh = make_mesh(tp=tp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    bench = Bench(args, config, mesh, variants)
    bench.measure(sorted(itertools.product(batches, lengths), key=lambda shape: (shape[0] * shape[1], shape[0])))


def link_seen(device, ranks: int) -> str:
    """The link's name, as far as hardware and environment say: nvlink, host (NCCL_P2P_DISABLE=1), or another."""
    if ranks == 1 or device.platform == "cpu":
        return "one device" if ranks == 1 else "cpu"
    label = tuned.link_label()
    if label != "nvlink or pcie p2p":
        return {"host memory": "host"}.get(label, label)
    return "nvlink" if hardware.missing(device.device_kind) is None else label


class Bench:
    """Measures shapes (batch, length), and keeps OUT up to date with each."""

    def __init__(self, args, config, mesh, variants: list[Variant]):
        self.args, self.config, self.mesh, self.variants = args, config, mesh, variants
        device, tp = mesh.devices.flat[0], mesh.shape["tp"]
        self.link = args.link_name or link_seen(device, tp)
        self.summary = self._earlier({"model": args.model, "layers": config.n_layers, "tp": tp})
        self.results = self.summary["results"].setdefault(self.link, {})
        limit = (device.memory_stats() or {}).get("bytes_limit", float("inf"))
        self.memory = USABLE * (limit if args.memory_gb is None else 1e9 * args.memory_gb)
        on = f"{tp} x {device.device_kind}, jax {jax.__version__}, {os.cpu_count()} CPU cores"
        self.go = {"date": str(datetime.date.today()), "link": self.link, "hardware": on}
        self.go |= {"commit": args.commit or runs.commit(), "command": f"`python {' '.join(sys.argv)}`"}
        runs.folder("--out", args.out)

    def _earlier(self, what: dict) -> dict:
        """Returns what OUT holds. Raises ConfigError where that is of another model."""
        file = self.args.out / "summary.json"
        if not file.is_file():
            return what | {"goes": [], "results": {}}
        try:
            summary = json.loads(file.read_text())
            had = {key: summary[key] for key in (*what, "goes", "results")}
            if not (isinstance(had["goes"], list) and isinstance(had["results"], dict)):
                raise TypeError("goes must be a list and results an object")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}: is no summary of this benchmark ({error!r}); name another --out") from None
        for key, value in what.items():
            runs.require(had[key] == value, f"{file}: {key}", had[key], f"this run has {value}; name another --out")
        return had

    def measure(self, shapes: list[tuple[int, int]]) -> None:
        start, params, too_large = time.perf_counter(), None, []
        wanted = {variant.given for variant in self.variants}
        for i, (batch, length) in enumerate(shapes):
            name = f"{batch}x{length}"
            earlier = self.results.get(name, {})
            # What did not fit is tried again: memory, or what is said of it, may be another.
            if wanted <= earlier.keys():
                print(f"{name}: measured before", flush=True)
                continue
            if self.args.seconds is not None and time.perf_counter() - start > self.args.seconds:
                left = ", ".join(f"{b}x{n}" for b, n in shapes[i:])
                print(f"no more time for {left}: the same command goes on with them", flush=True)
                break
            if params is None:
                params = load_params(in_memory(self.config), self.mesh, "bfloat16")
            smaller = next((f"{b}x{n}" for b, n in too_large if b <= batch and n <= length), None)
            reason = f"larger than {smaller}, which does not fit" if smaller else None
            if length > self.config.max_length:
                reason = f"the model's longest sequence has {self.config.max_length} tokens"
            found = None if reason else self._shape(params, batch, length)
            if isinstance(found, str):
                too_large.append((batch, length))
            if not isinstance(found, dict):
                found = {"skipped": reason or found}
            self.results[name] = found
            self._print(name, found)
            self._write()

    def _shape(self, params, batch: int, length: int) -> dict | str:
        """Results of every variant, or why there are none."""
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, self.config.vocab_size, (batch, length), np.int32)
        lengths, rows = np.full((batch,), length, np.int32), Sampling().rows(batch)
        samplers, seconds, sent = {}, {v.given: [] for v in self.variants}, {}
        try:
            for variant in self.variants:
                programs = self._programs(variant, params)
                with free_communication.messages_left_out() if variant.codec == "free" else contextlib.nullcontext():
                    program = programs.prefill(batch, length, length, greedy=True)
                if (need := bytes_needed(program)) > self.memory:
                    return f"{variant.given} needs {need / 1e9:.1f} GB, of {self.memory / 1e9:.1f} GB that can be used"
                (table,) = programs.tables.values()
                sent[variant.given] = 0.0 if variant.codec == "free" else table.total()[0] / 1e6
                samplers[variant.given] = lambda program=program, put=programs.put: sample(
                    program, params, put, prompt, lengths, rows
                )
            for i in range(WARM_UP + self.args.rounds):
                for name, run in samplers.items():
                    taken = run()
                    if i >= WARM_UP:
                        seconds[name].append(taken)
        except KernelUnavailableError as error:
            raise ConfigError(f"--variants: {error}") from None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return "out of memory"
        if self.args.profile:
            self._profile(f"{self.link.replace(' ', '_')}-{batch}x{length}", samplers)
        found = bench_step.summarise(seconds)
        return {name: row | {"mb_sent": sent[name], "rounds": self.args.rounds} for name, row in found.items()}

    def _profile(self, shape: str, samplers) -> None:
        times = {}
        for name, run in samplers.items():
            listing = self.args.out / f"kernels-{shape}-{name.replace(':', '-')}.csv"
            times[name] = kernel_times.traced(run, 1, listing)
        lines = [f"# Kernels of one sample, {shape}", "", *kernel_times.table(times)]
        (self.args.out / f"kernels-{shape}.md").write_text("\n".join(lines) + "\n")

    def _programs(self, variant: Variant, params) -> Programs:
        codec = "none" if variant.codec in ("none", "free") else variant.codec
        tp, least = self.mesh.shape["tp"], self.args.min_bytes
        options = {"min_bytes": least, "link": variant.link, "error_feedback": variant.feedback}
        settings = Settings(tp, Compression(codec, **options), chains=variant.chains)
        return Programs(self.config, settings, self.mesh, params)

    def _print(self, name: str, found: dict) -> None:
        if "skipped" in found:
            print(f"{name}: skipped, {found['skipped']}", flush=True)
            return
        for variant, r in found.items():
            side = f"{r['ms']:9.2f} ms, none {found['none']['ms']:9.2f} ms, {r['speedup']:.2f}x"
            spread = f"{r['fastest_ms']:.2f} to {r['slowest_ms']:.2f}"
            print(f"{name:>9} {variant:24} {side}, {spread}, {r['mb_sent']:.1f} MB sent", flush=True)

    def _write(self) -> None:
        if self.go not in self.summary["goes"]:
            self.summary["goes"].append(self.go)
        in_order = lambda name: tuple(map(int, name.split("x")))
        self.results = {name: self.results[name] for name in sorted(self.results, key=in_order)}
        self.summary["results"][self.link] = self.results
        (self.args.out / "summary.json").write_text(json.dumps(self.summary, indent=1) + "\n")
        (self.args.out / "README.md").write_text("\n".join(ttft_report.report(self.summary)) + "\n")
        ttft_report.plot(self.summary, self.args.out / "ttft.png")


def bytes_needed(program) -> int:
    """Bytes on one device, the parameters among them."""
    a = program.memory_analysis()
    return a.argument_size_in_bytes + a.output_size_in_bytes + a.temp_size_in_bytes - a.alias_size_in_bytes


def sample(program, params, put, prompt: np.ndarray, lengths: np.ndarray, rows) -> float:
    """Seconds from ids on the host to the chosen tokens on the host."""
    start = time.perf_counter()
    chosen, cache = program(params, *put((prompt, lengths, rows)))
    np.asarray(chosen)
    seconds = time.perf_counter() - start
    jax.block_until_ready(cache)
    return seconds


if __name__ == "__main__":
    sys.exit(cli.run(main))
