"""Compares the forecast with every measured step and time to a first token in experiments/results, and with published
rows.

    python experiments/forecast_errors.py --out experiments/results/forecast

Nothing is fitted here: constants are those of experiments/fit_forecast.py, of sums and kernels alone. Steps of programs
that are not ours (dropin's MaxText, google-tunix and stack) and runs on emulated devices have no forecast.

output    OUT/README.md, OUT/summary.json, OUT/forecast.png, taco_jax/forecast/errors.json (what the command says of
          its own errors)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import runs

from taco_jax.codec import as_codec
from taco_jax.config import (
    CompressionConfig,
    DataParallelConfig,
    MeshConfig,
    PipelineConfig,
    TrainConfig,
    cli,
)
from taco_jax.config.flags import load
from taco_jax.forecast import constants, hardware, links, messages, overlap, predict, work
from taco_jax.forecast.cost import Machine
from taco_jax.models.config import ModelConfig
from taco_jax.models.presets import preset

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
ERRORS = ROOT / "taco_jax" / "forecast" / "errors.json"
# Groups of rows: what they are, and which of them the goal is of.
GROUPS = {
    "steps of 7B": "steps of models of 7B's width",
    "first token": "times to the first token",
    "small steps": "steps of models of 350M parameters and fewer",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A measured time. exact: the measured exact time of the same go, for speed-ups; None where there is none."""

    group: str
    what: str
    codec: str
    ms: float
    exact: float | None
    forecast: float
    exact_forecast: float | None
    source: str

    @property
    def error(self) -> float:
        return self.forecast / self.ms - 1

    @property
    def speedup_error(self) -> float | None:
        if self.exact is None or self.codec in ("none", "free"):
            return None
        return (self.exact_forecast / self.forecast) / (self.exact / self.ms) - 1


def summary(folder: str) -> dict:
    return json.loads((RESULTS / folder / "summary.json").read_text())


def machine(gpu: str, link: str, devices: int, kernels: str = "", **more) -> Machine:
    found = hardware.gpu(gpu)
    return Machine(found, links.parse(link, found), devices, kernels=kernels, **more)


def experiment(name: str, **changes) -> TrainConfig:
    """The configuration of an experiment as most of the record's steps ran: in one chain, without copies."""
    config = load(ROOT / "experiments" / f"{name}.py")
    as_then = {"chains": 1, "compression": dataclasses.replace(config.compression, backward_link="auto")}
    return dataclasses.replace(config, **as_then | changes)


def of_seven(layers: int | None = None, tp: int = 4, link: str = "auto", **model) -> TrainConfig:
    compression = CompressionConfig(link=link, backward_link=link)
    config = experiment("qwen7b", mesh=MeshConfig(tp=tp), compression=compression)
    changes = model | ({} if layers is None else {"n_layers": layers})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def rows_of(group: str, what: str, times: dict[str, float], forecast: Callable[[str], float], source: str,
            exact: tuple[float, float] | None = None) -> Iterator[Row]:  # fmt: skip
    """exact: of another program of the same go, (milliseconds, forecast), where that is what speed-ups are of."""
    if exact is None:
        exact = (times["none"], forecast("none")) if "none" in times else (None, None)
    for codec, ms in times.items():
        yield Row(group, what, codec, ms, exact[0], forecast(codec), exact[1], source)


def steps(what: str, config: TrainConfig, on: Machine, times: dict[str, float], source: str,
          group: str = "steps of 7B", exact: tuple[float, float] | None = None) -> Iterator[Row]:  # fmt: skip
    return rows_of(group, what, times, lambda codec: 1e3 * predict.step(config, on, codec).seconds, source, exact)


# Kernels that decode had a CTA for every multiprocessor: beside a message, whose kernel holds some, they took 64 to 75
# us, and 32 without (experiments/results/chains_2gpus_host).
DECODING_BESIDE = 69.5 / 32
# What is counted of programs before December 2026, where a table of taco_jax/forecast/work.py says otherwise.
MLP = {True: {"dx": 15, "kept": 13, "dx of kept": 17}, False: {"kept": 11, "dx of kept": 6}}
JOINS = {"layernorm": work.Passes(0, 2, 0, kernels=4), "rmsnorm": work.Passes(0, 2, 0, kernels=16)}


@contextlib.contextmanager
def older_programs() -> Iterator[None]:
    """Inside the block a step's work is that of programs before December 2026, which the record's steps are of.

    They joined the cast kernels of products that share an input, and the cotangents of their results, for each product
    that took them, and in chains for each chain; they kept each step of the mlp's activation where nothing was
    recomputed. A layer in chains sent its last sum beside nothing, and kernels that decode found no room beside
    messages.
    """
    tables = ("MLP", "GELU", "ZEROS", "BACKWARD", "layer_weights", "prompt_weights")
    present = {name: getattr(work, name) for name in tables}

    def with_joins(s: work.Shard, remat: str, size: int = 2, chains: int = 1) -> list[work.Work]:
        joined, cast = 2 * size * s.joined_weights, (work.F32 + size) * s.joined_weights
        more = {"full": 2 * joined + cast, "dots": joined, "none": joined + (work.F32 - size) * s.joined_weights}
        nbytes = more[remat] + (chains - 1) * 2 * joined
        joins = work.Work(work.UP, "forward", "memory", bytes=nbytes, kernels=0.0)
        return [*present["layer_weights"](s, remat, size, chains), joins]

    def with_prompt_joins(s: work.Shard, size: int = 2, chains: int = 1) -> list[work.Work]:
        more = (chains - 1) * 2 * size * s.joined_weights
        joins = work.Work(work.UP, "forward", "memory", bytes=more, kernels=0.0)
        return [*present["prompt_weights"](s, size, chains), joins]

    work.MLP = {gated: present["MLP"][gated] | MLP[gated] for gated in MLP}
    work.GELU = work.GELU | {"kept": 3}
    work.ZEROS = work.ZEROS | {"none": dataclasses.replace(work.ZEROS["none"], mlp=5, up=0)}
    work.BACKWARD = {
        norm: {kept: passes.plus(JOINS[norm]) for kept, passes in of_norm.items()}
        for norm, of_norm in work.BACKWARD.items()
    }
    work.layer_weights = with_joins
    work.prompt_weights = with_prompt_joins
    overlap.HANDED_ON, overlap.DECODING_BESIDE = False, DECODING_BESIDE
    try:
        yield
    finally:
        overlap.HANDED_ON, overlap.DECODING_BESIDE = True, 1.0
        for name, value in present.items():
            setattr(work, name, value)


def measured() -> list[Row]:
    """Every row, with its forecast."""
    with older_programs():
        return list(recorded())


def recorded() -> Iterator[Row]:
    ms = lambda ways: {codec: row["ms"] for codec, row in ways.items()}
    # The first runs had no kernels yet: their codec is XLA's.
    for folder, chosen in (("qwen7b_tp4", ("nvlink", "host")), ("qwen7b_tp4_host", ("host",))):
        for link in chosen:
            way = "nccl" if link == "nvlink" else "auto"
            on, config = machine("H100", link, 4, "jnp"), of_seven(link=way)
            yield from steps(f"7B, tp 4, {link}, 4 x H100, jnp codec", config, on, ms(summary(folder)[link]), folder)
    found = summary("qwen7b_tp4_kernels")
    yield from steps("7B, tp 4, host, 4 x H200", of_seven(), machine("H200", "host", 4), ms(found["host"]),
                     "qwen7b_tp4_kernels")  # fmt: skip
    four = machine("H200", "nvlink", 4)
    yield from steps("7B, tp 4, nvlink, separate kernels, 4 x H200", of_seven(link="nccl"), four, ms(found["nvlink"]),
                     "qwen7b_tp4_kernels")  # fmt: skip
    yield from steps("7B, tp 4, nvlink, one kernel a sum, 4 x H200", of_seven(), four,
                     ms(summary("qwen7b_tp4_nvlink")["nvlink"]), "qwen7b_tp4_nvlink")  # fmt: skip
    text = (RESULTS / "overlap_2gpus" / "README.md").read_text()
    cell = lambda what: float(re.search(rf"\| {re.escape(what)} \| ([\d.]+) \|", text)[1])
    two, fourteen = machine("H200", "nvlink", 2), of_seven(14, 2)
    one = "`taco`, one kernel a sum on all 132 multiprocessors"
    times = {"free": cell("nothing sent"), "none": cell("exact, NCCL"), "taco": cell(one)}
    yield from steps("14 layers, tp 2, nvlink, 2 x H200", fourteen, two, times, "overlap_2gpus")
    chained = dataclasses.replace(fourteen, chains=2)
    times = {"none": cell("exact, NCCL, 2 chains")}
    yield from steps("the same in 2 chains", chained, two, times, "overlap_2gpus")
    text = (RESULTS / "moves_2gpus" / "README.md").read_text()
    times = {name: float(after) for name, after in re.findall(r"\| (\w+) \| [\d.]+ \([^)]*\) \| ([\d.]+) \(", text)}
    host = machine("H200", "host", 2)
    yield from steps("6 layers, tp 2, host, 2 x H200", of_seven(6, 2), host, times, "moves_2gpus")
    times = ms(summary("dropin_2gpus_host")["own trainer"])
    yield from steps("6 layers, vocabulary 32,000, tp 2, host, 2 x H200", of_seven(6, 2, vocab_size=32000), host, times,
                     "dropin_2gpus_host (own trainer)")  # fmt: skip
    times = ms(summary("dropin_2gpus_nvlink")["own trainer"])
    yield from steps("6 layers, vocabulary 32,000, tp 2, nvlink, 2 x H200", of_seven(6, 2, vocab_size=32000), two,
                     times, "dropin_2gpus_nvlink (own trainer)")  # fmt: skip
    for name, ways in summary("ttft_1gpu")["results"]["one device"].items():
        batch, length = map(int, name.split("x"))
        forecast = lambda codec, b=batch, n=length: 1e3 * predict.first_token(
            preset("qwen2p5_7b"), machine("H200", "host", 1), codec, tp=1, length=n, batch=b
        ).seconds  # fmt: skip
        yield from rows_of("first token", f"7B, {name} tokens, 1 x H200", ms(ways), forecast, "ttft_1gpu")
    yield from chains()
    yield from copies()
    yield from small()


def chains() -> Iterator[Row]:
    """A step and a first token in two chains, beside those in one of the same go."""
    folder = "chains_2gpus_host"
    text = (RESULTS / folder / "README.md").read_text()
    table = text[text.index("## The training step before") :]
    times = {name: float(ms) for name, ms in re.findall(r"^\| ([\w:]+) \| ([\d.]+) \| [\d.]+, [\d.]+ \|", table, re.M)}
    host, config = machine("H200", "host", 2), of_seven(6, 2, vocab_size=32000)
    what = "6 layers, vocabulary 32,000, tp 2, host, 2 x H200, another go"
    yield from steps(what, config, host, {name: ms for name, ms in times.items() if ":" not in name}, folder)
    exact = times["none"], 1e3 * predict.step(config, host, "none").seconds
    chained = {name[:-2]: ms for name, ms in times.items() if name.endswith(":2")}
    yield from steps("the same in 2 chains", dataclasses.replace(config, chains=2), host, chained, folder, exact=exact)
    model = dataclasses.replace(preset("qwen2p5_7b"), n_layers=8)

    def first(codec: str, feedback: bool = False, chains: int = 1) -> float:
        given = {"tp": 2, "length": 8192, "feedback": feedback, "chains": chains}
        return 1e3 * predict.first_token(model, host, codec, **given).seconds

    (before,) = re.findall(r"^\| before, ms \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) [^|]*\| ([\d.]+) ", text, re.M)
    after = {name: row["ms"] for name, row in summary(folder)["results"]["host"]["1x8192"].items()}
    what, group = "7B, 8 layers, 1x8192 tokens, tp 2, host, 2 x H200", "first token"
    for which, (none, free, plain, fed) in (
        (f"{what}, before", map(float, before)),
        (what, (after[name] for name in ("none", "free", "int4h:auto:plain", "int4h:auto:fed"))),
    ):
        yield from rows_of(group, which, {"none": none, "free": free, "int4h": plain}, first, folder)
        with_errors = lambda codec: first(codec, feedback=True)
        exact = none, first("none")
        yield from rows_of(group, f"{which}, with feedback", {"int4h": fed}, with_errors, folder, exact)
    in_chains = lambda codec: first(codec, feedback=True, chains=2)
    times = {"int4h": after["int4h:auto:fed:2"]}
    yield from rows_of(group, f"{what}, with feedback, 2 chains", times, in_chains, folder, exact)


def copies() -> Iterator[Row]:
    """Steps over NVLink with gradients' sums by copy engines, beside those in one kernel of the same go."""
    folder = "step_nvlink_2gpus"
    two, config = machine("H200", "nvlink", 2), of_seven(6, 2, vocab_size=32000)
    copied = dataclasses.replace(config, compression=CompressionConfig())
    what = "6 layers, vocabulary 32,000, tp 2, nvlink, 2 x H200"
    times = {name: row["ms"] for name, row in summary(folder).items() if ":" not in name}
    yield from steps(f"{what}, another go", config, two, times, folder)
    found = json.loads((RESULTS / folder / "copies_summary.json").read_text())
    times = {name: row["ms"] for name, row in found.items() if ":" not in name}
    yield from steps(f"{what}, a third go", config, two, times, folder)
    exact = times["none"], 1e3 * predict.step(config, two, "none").seconds
    times = {name.partition(":")[0]: row["ms"] for name, row in found.items() if name.endswith(":auto/copy")}
    yield from steps("the same with gradients' sums copied", copied, two, times, folder, exact=exact)


def small() -> Iterator[Row]:
    """Steps of small models, whose tokens a second are those of the record."""
    group, codecs = "small steps", ("none", "taco", "e4m3", "e5m2", "int8h", "int6h", "int4h")
    config = experiment("gpt2_124m")
    per_step = predict.tokens_of(config)
    ms = lambda ways: {c: 1e3 * per_step / row["tokens_per_second"] for c, row in ways.items() if c in codecs}
    times = ms(summary("codec_ablation")["gpt2_124m"])
    yield from steps("GPT-2 124M, tp 4, nvlink, 4 x H200", config, machine("H200", "nvlink", 4), times,
                     "codec_ablation", group)  # fmt: skip
    for name in ("gpt2_124m", "gpt2_350m"):
        config = experiment(name, mesh=MeshConfig(tp=2), accumulation=1, remat="dots", loss_chunk=8192, global_batch=64)
        per_step = predict.tokens_of(config)
        times = ms(summary("accuracy")[name])
        what = f"GPT-2 {name[5:].upper()}, tp 2, nvlink, 2 x H200"
        yield from steps(what, config, machine("H200", "nvlink", 2), times, "accuracy", group)
    config = experiment("gpt2_124m", mesh=MeshConfig(tp=2), accumulation=1, remat="dots", loss_chunk=8192)
    times = {name: row["ms"] for name, row in summary("step_gpt2_124m").items()}
    yield from steps("GPT-2 124M, tp 2, nvlink, 2 x H200, another go", config, machine("H200", "nvlink", 2), times,
                     "step_gpt2_124m", group)  # fmt: skip
    config = experiment("gpt2_124m", mesh=MeshConfig(tp=2), accumulation=1, global_batch=16)
    yield from steps("GPT-2 124M, 16 sequences, tp 2, nvlink, 2 x H200", config, machine("H200", "nvlink", 2),
                     {"int4h:int8h": summary("guard_cost")["plain_step_ms"]}, "guard_cost", group)  # fmt: skip
    for mode in ("dots", "none"):
        for way, row in summary("stages_2gpus")[f"stages, remat {mode}"].items():
            alone = way == "one device"
            pipeline = PipelineConfig(schedule="gpipe" if alone else way, microbatches=1 if alone else 8,
                                      chunks=2 if way == "circular" else 1)  # fmt: skip
            config = experiment("gpt2_350m", mesh=MeshConfig(pp=1 if alone else 2), accumulation=8 if alone else 1,
                                global_batch=32, remat=mode, pipeline=pipeline)  # fmt: skip
            what = f"GPT-2 350M, {'1' if alone else f'{way}, nvlink, 2'} x H200, remat {mode}"
            yield from steps(what, config, machine("H200", "nvlink", 1 if alone else 2), {"none": row["ms"]},
                             "stages_2gpus", group)  # fmt: skip


def published() -> list[dict]:
    """Rows of others, with a forecast of their conditions as far as they are published."""
    out = []

    def row(source: str, what: str, given: tuple[float, ...], forecast: Sequence[float], why: str) -> None:
        low, high = min(given), max(given)
        near = min(max(statistics.fmean(forecast), low), high)
        error = statistics.fmean(forecast) / near - 1
        out.append({"source": source, "what": what, "published": list(given), "forecast": list(forecast),
                    "error": error, "why": why})  # fmt: skip

    def gain(config: TrainConfig, on: Machine, codecs: str) -> float:
        return predict.step(config, on, "none").seconds / predict.step(config, on, codecs).seconds

    speeds = ("10GB/s,15us", "13GB/s,15us")
    gpt = experiment(
        "gpt3_6p7b", mesh=MeshConfig(tp=4), data=of_seven().data, global_batch=8, remat="full", accumulation=1
    )
    for tp, given in ((4, 1.70), (8, 1.87)):
        on = [machine("H100", speed, tp) for speed in speeds]
        at = dataclasses.replace(gpt, mesh=MeshConfig(tp=tp))
        row("TACO, arXiv 2604.24088", f"step, TP {tp}, 10 to 13 GB/s a GPU, H100, 8 bits", (given,),
            [gain(at, m, "taco") for m in on],
            "the model's size, batch and recomputation are not in the row: GPT-3 6.7B, 16,384 tokens, remat full; "
            "latency 15 us")  # fmt: skip
    axes = dataclasses.replace(
        gpt, mesh=MeshConfig(dp=2, pp=2, tp=2), global_batch=16, data_parallel=DataParallelConfig(gradients="int8h"),
        pipeline=PipelineConfig(schedule="1f1b", microbatches=4), remat="none",
    )  # fmt: skip
    row("TACO, arXiv 2604.24088", "step, three axes", (1.50, 1.53),
        [gain(axes, machine("H100", s, 8), "taco") for s in speeds],
        "sizes of the axes are not in the row: dp 2, pp 2, tp 2, 1F1B, four microbatches")  # fmt: skip
    jnp = [gain(gpt, machine("H100", s, 4, "jnp"), "taco") for s in speeds]
    row("TACO, arXiv 2604.24088", "step, not fused", (0.70, 0.86), jnp,
        "their codec before fusion is another program: XLA's takes a tenth of the GPU's memory bandwidth, theirs "
        "much less, and the row does not say how much")  # fmt: skip
    llama = ModelConfig(vocab_size=32000, d_model=8192, n_layers=80, n_heads=64, n_kv_heads=8, head_dim=128,
                        d_mlp=28672, max_length=4096)  # fmt: skip
    l4 = hardware.gpu("L4")
    first = lambda on, codec, model=llama, tp=8, n=128, b=2: (
        predict.first_token(model, on, codec, tp=tp, length=n, batch=b, min_bytes=0).seconds
    )
    over = lambda link: Machine(l4, link, 8)
    faster = lambda on: first(on, "none") / first(on, "mxfp4")
    slow = next(s / 10 for s in range(200, 0, -1) if faster(over(links.given("slower", s / 10, 15.0))) >= 2.08)
    row("TP inference, arXiv 2411.09510", "first token, 8 x L4, PCIe, mxfp4", (2.08,),
        [faster(over(links.parse("pcie4x8", l4)))],
        "model, prompt and the link's speed are not in the row: Llama 2 70B, 2 x 128 tokens, 8 lanes of PCIe 4 for a "
        f"card, peer to peer; the row would be met at {slow:.1f} GB/s a card, which cards that share a bridge, or go "
        "over host memory for want of peer access, may have")  # fmt: skip
    h100 = machine("H100", "nvlink", 4)
    vllm = [first(h100, "none", preset("qwen2p5_7b"), 4, n, 1) / first(h100, "int8h", preset("qwen2p5_7b"), 4, n, 1)
            for n in (2048, 8192)]  # fmt: skip
    row(
        "vLLM, pull request 39783",
        "first token, NVLink, 8 bits",
        (1.03, 1.08),
        vllm,
        "model, prompt and ranks are not in the row: Qwen2.5 7B, tp 4, 2,048 and 8,192 tokens; ours is one kernel",
    )
    sdp = experiment(
        "gpt3_6p7b", mesh=MeshConfig(dp=32, tp=4), data=of_seven().data, global_batch=32, accumulation=1, remat="full",
        data_parallel=DataParallelConfig(gradients="sdp4", zero1=True, parameters="int4h"),
    )  # fmt: skip
    a100 = hardware.gpu("A100 40GB")
    many = Machine(a100, links.parse("nvlink", a100), 128, 32, links.parse("100Gb/s,10us", a100, key="--between"))
    only_dp = dataclasses.replace(sdp, compression=CompressionConfig("none", "none"))
    exact = dataclasses.replace(
        only_dp, data_parallel=DataParallelConfig(gradients="none", zero1=True, parameters="bfloat16")
    )
    row("SDP4Bit, arXiv 2410.15526", "step, data parallelism in 4 bits, 128 GPUs", (4.08,),
        [predict.step(exact, many).seconds / predict.step(only_dp, many).seconds],
        "at most, by the row; hardware and model are not in it: GPT-3 6.7B, tp 4, one sequence of 2,048 tokens a "
        "replica, 32 hosts of 4 A100 at 100 Gb/s; gradients exact in float32, theirs in 16 bits are half")  # fmt: skip
    nvlink8 = machine("H100", "nvlink", 8)
    for mega, given in ((64, 1.20), (256, 1.33)):
        sum_ = messages.SiteMessage("", "forward", "psum", "tp", 8, mega << 20, 2, 1, as_codec("int8h"))
        row("FlashInfer", f"all-reduce of {mega}M elements, NVLink, 8 bits", (given,),
            [nvlink8.exact_seconds(sum_, 8, 1) / sum(nvlink8.compressed_seconds(sum_, 8, 1))],
            "separate kernels, as theirs; 8 ranks share the link as 4 do")  # fmt: skip
    for mib, us in ((64, 316), (128, 561)):
        sum_ = messages.SiteMessage("", "forward", "psum", "tp", 8, mib << 19, 2, 1)
        row("NCCL, 8 x H100, NVLS", f"exact all-reduce of {mib} MiB, us", (us,),
            [1e6 * nvlink8.exact_seconds(sum_, 8, 1)],
            "sums in the switch (NVLS), at 475 to 480 GB/s; measured machines join GPUs by links, NCCL's ring there "
            "has 260 to 316 GB/s")  # fmt: skip
    out.append({"source": "torchcomms, 2026-09", "what": "all-reduce from 27 MB, 8 x MI350X, FP8",
                "published": [1.28, 1.41], "forecast": [], "error": None,
                "why": "no forecast: no AMD GPU has been measured, and none is in the table"})  # fmt: skip
    return out


def group_errors(rows: Sequence[Row]) -> dict:
    groups = {}
    for name, what in GROUPS.items():
        errors = sorted(abs(r.error) for r in rows if r.group == name)
        speed = sorted(abs(e) for r in rows if r.group == name and (e := r.speedup_error) is not None)
        groups[name] = {"what": what, "rows": len(errors), "median": statistics.median(errors), "worst": errors[-1]}
        if speed:
            groups[name] |= {"speedup_median": statistics.median(speed), "speedup_worst": speed[-1]}
    every = sorted(abs(r.error) for r in rows)
    groups["all"] = {"what": "all rows", "rows": len(every), "median": statistics.median(every), "worst": every[-1]}
    return groups


def readme(go: dict, groups: dict, rows: Sequence[Row], others: Sequence[dict]) -> str:
    lines = ["# The forecast against what was measured", ""]
    lines += [f"* {key}: {value}" for key, value in go.items()]
    lines += [
        "",
        "Constants are of sums and kernels alone (experiments/fit_forecast.py). Error: forecast / measured - 1.",
        "",
    ]
    lines += ["| rows | number | median error | worst | speed-ups: median error | worst |", "|---|---|---|---|---|---|"]
    for name, g in groups.items():
        speed = [f"{100 * g[k]:.1f} %" if k in g else "" for k in ("speedup_median", "speedup_worst")]
        lines.append(f"| {name}: {g['what']} | {g['rows']} | {100 * g['median']:.1f} % | {100 * g['worst']:.1f} % | "
                     f"{speed[0]} | {speed[1]} |")  # fmt: skip
    lines += ["", "## Every row", "", "| what | codec | measured ms | forecast ms | error | speed-up's error | from |",
              "|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        speed = "" if r.speedup_error is None else f"{100 * r.speedup_error:+.1f} %"
        lines.append(f"| {r.what} | {r.codec} | {r.ms:.1f} | {r.forecast:.1f} | {100 * r.error:+.1f} % | {speed} | "
                     f"{r.source} |")  # fmt: skip
    lines += ["", "## Published rows, without fitting", "",
              "The error is that of the forecasts' mean against the nearest published value.", ""]  # fmt: skip
    lines += [
        "| source | what | published | forecast | error | conditions, and why it differs |",
        "|---|---|---|---|---|---|",
    ]
    number = lambda v: f"{v:.0f}" if v >= 100 else f"{v:.2f}"
    for o in others:
        error = "" if o["error"] is None else f"{100 * o['error']:+.0f} %"
        cells = [" to ".join(map(number, o[key])) or "none" for key in ("published", "forecast")]
        lines.append(f"| {o['source']} | {o['what']} | {cells[0]} | {cells[1]} | {error} | {o['why']} |")
    lines += ["", "![forecast and measurement](forecast.png)"]
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: Sequence[Row]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in GROUPS:
        of = [r for r in rows if r.group == name]
        axes.loglog([r.ms for r in of], [r.forecast for r in of], "o", alpha=0.7, label=name)
    ends = [min(r.ms for r in rows), max(r.ms for r in rows)]
    axes.loglog(ends, ends, color="grey")
    axes.set(xlabel="measured ms", ylabel="forecast ms")
    axes.legend()
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str]) -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    runs.folder("--out", args.out)
    rows, others = measured(), published()
    groups = group_errors(rows)
    go = {
        "date": datetime.date.today(), "hardware": "none: a CPU computes the forecasts in seconds",
        "commit": args.commit or runs.commit(), "command": f"`python {' '.join(sys.argv)}`",
    }  # fmt: skip
    (args.out / "README.md").write_text(readme(go, groups, rows, others))
    listed = [dataclasses.asdict(r) | {"error": r.error, "speedup_error": r.speedup_error} for r in rows]
    content = {"groups": groups, "rows": listed, "published": others, "constants": constants.load()}
    (args.out / "summary.json").write_text(json.dumps(content, indent=1) + "\n")
    ERRORS.write_text(json.dumps({"groups": groups}, indent=1) + "\n")
    draw(args.out / "forecast.png", rows)
    print("\n".join(f"{name}: {g['rows']} rows, median {g['median']:.1%}, worst {g['worst']:.1%}"
                    for name, g in groups.items()))  # fmt: skip


if __name__ == "__main__":
    sys.exit(cli.run(main))
