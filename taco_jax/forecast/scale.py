"""From a few GPUs to thousands: how a model is best laid out on them, and where a codec stops paying.

Tokens of a GPU stay the same, so the batch grows with the GPUs (weak scaling). For each number of GPUs and each way of
sending the fastest of all layouts dp x pp x tp is taken whose state fits the memory: tp inside a host, stages 1F1B,
gradients and optimizer cut over dp (ZeRO-1). Layers go in one chain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from taco_jax.config import MeshConfig, PipelineConfig, TrainConfig
from taco_jax.config.checks import check
from taco_jax.errors import ConfigError
from taco_jax.forecast import predict
from taco_jax.forecast.cost import Machine
from taco_jax.forecast.hardware import Gpu
from taco_jax.forecast.links import Link
from taco_jax.forecast.work import Shard
from taco_jax.models.config import ModelConfig

PER_HOST = 8
MOST_GPUS = 1 << 20
USABLE = 0.9
"""Of the memory: the rest is what XLA, NCCL and fragments take (assumed)."""
WAYS = {
    "none": ("none", "none", "bfloat16"),
    "tp": ("int8h", "none", "bfloat16"),
    "dp": ("none", "int8h", "int8h"),
    "taco": ("taco", "int8h", "int8h"),
    "int6h": ("int6h", "int8h", "int8h"),
    "int4h": ("int4h", "sdp4", "int4h"),
}
"""Codecs of tp, of the gradients and of the weights over dp. `tp` and `dp` compress one axis alone, in int8h. Stages
send int8_token and e4m3h where tp is compressed."""


@dataclasses.dataclass(frozen=True)
class Point:
    """The best layout of one number of GPUs in one way. tokens: of a second. bubble, messages, codec: shares of the
    step."""

    gpus: int
    way: str
    dp: int
    pp: int
    tp: int
    seconds: float
    tokens: float
    bubble: float
    messages: float
    codec: float


def counts(text: str) -> list[int]:
    """The numbers of GPUs of "8..8192": powers of two of the first.

    Raises:
      ConfigError: it is no such range.
    """
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and (not dots or last.isdecimal())):
        raise ConfigError(f"--scale {text!r}: must be a range of GPUs such as 8..8192")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= MOST_GPUS:
        raise ConfigError(f"--scale {text!r}: must rise from 1 or more to at most {MOST_GPUS:,}, such as 8..8192")
    out = [low]
    while out[-1] * 2 <= high:
        out.append(out[-1] * 2)
    return out


def study(config: TrainConfig, gpu: Gpu, link: Link, between: Link, *, gpus: list[int], per_host: int = PER_HOST,
          rails: int = PER_HOST, ways: tuple[str, ...] = tuple(WAYS)) -> list[Point]:  # fmt: skip
    """The best layouts; a number of GPUs on which nothing fits has none.

    config: its batch is that of its mesh.
    """
    per_gpu = config.global_batch / config.mesh.size
    out = []
    for n in gpus:
        machine = _machine(gpu, link, between, n, per_host=per_host, rails=rails)
        best: dict[str, Point] = {}
        for layout in layouts(config, gpu, n, per_gpu, per_host):
            for way in ways:
                point = _point(_in_way(layout, way), machine, way, n)
                if way not in best or point.seconds / point.tokens < best[way].seconds / best[way].tokens:
                    best[way] = point
        out += [dataclasses.replace(p, tokens=p.tokens / p.seconds) for p in best.values()]
    return out


def _machine(gpu: Gpu, link: Link, between: Link, n: int, per_host: int, rails: int) -> Machine:
    hosts = max(1, n // per_host)
    return Machine(gpu, link, n, hosts=hosts, between=between if hosts > 1 else None, rails=rails)


def _in_way(config: TrainConfig, way: str) -> TrainConfig:
    tp, gradients, parameters = WAYS[way]
    if not config.data_parallel.zero1:
        parameters = "none"
    return dataclasses.replace(
        config,
        compression=dataclasses.replace(config.compression, forward=tp, backward=tp, plan={}),
        data_parallel=dataclasses.replace(config.data_parallel, gradients=gradients, parameters=parameters),
    )


def _point(config: TrainConfig, machine: Machine, way: str, n: int) -> Point:
    found = predict.step(config, machine)
    seconds, mesh = found.seconds, config.mesh
    share = lambda part: part / seconds
    return Point(
        n, way, dp=mesh.dp, pp=mesh.pp, tp=mesh.tp, seconds=seconds, tokens=predict.tokens_of(config),
        bubble=share(found.bubble), messages=share(found.total("messages")), codec=share(found.total("codec")),
    )  # fmt: skip


def layouts(config: TrainConfig, gpu: Gpu, n: int, per_gpu: float, per_host: int) -> Iterator[TrainConfig]:
    """Every layout of a model on n GPUs that fits, each replica in as many microbatches as it has sequences."""
    for tp in _powers(min(per_host, n)):
        for pp in _powers(n // tp):
            dp = n // tp // pp
            sequences = max(1, round(per_gpu * n / dp))
            if n % (tp * pp) or pp > 1 and sequences < pp:
                continue
            changed = dataclasses.replace(
                config, mesh=MeshConfig(dp=dp, pp=pp, tp=tp), global_batch=sequences * dp, accumulation=1, chains=1,
                remat="full" if pp == 1 else "none", sequence_parallel=None,
                pipeline=PipelineConfig(schedule="1f1b", microbatches=sequences),
                data_parallel=dataclasses.replace(config.data_parallel, zero1=dp > 1,
                                                  parameters="bfloat16" if dp > 1 else "none"),
            )  # fmt: skip
            if pp == 1 and sequences > 1:
                changed = dataclasses.replace(changed, accumulation=_accumulation(sequences))
            try:
                changed = check(changed)
            except ConfigError:
                continue
            if not gpu.memory_gb or memory_bytes(changed) <= USABLE * gpu.memory_gb * 1e9:
                yield changed


def _powers(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length())]


def _accumulation(sequences: int, most: int = 8) -> int:
    """Microbatches of at most so many sequences, the fewest that divide them."""
    return next(k for k in range(math.ceil(sequences / most), sequences + 1) if sequences % k == 0)


def memory_bytes(config: TrainConfig) -> float:
    """Bytes of one device: weights, gradients, both moments, and what is kept between the passes.

    An estimate for choosing a layout; `--dry-run` asks XLA.
    """
    model, mesh = config.model, config.mesh
    shard, layers = Shard(model, mesh.tp), config.model.n_layers // config.mesh.pp
    n = shard.parameters(layers)
    cut = mesh.dp if config.data_parallel.zero1 else 1
    state = n * (4 + 12 / cut + 2) if cut > 1 else n * 16
    micro = config.global_batch // mesh.dp // config.accumulation
    if mesh.pp > 1:
        micro //= config.pipeline.microbatches
    tokens = micro * config.data.sequence_length
    inputs = min(config.pipeline.microbatches, 2 * mesh.pp - 1) if mesh.pp > 1 else 0
    if config.remat == "full":
        kept = layers * 3 * model.d_model
    else:
        kept = layers * (8 * model.d_model + 2 * (shard.q + 2 * shard.kv) + 2 * shard.up + 2 * shard.f)
    return state + 2 * tokens * (kept + inputs * model.d_model) + 8 * min(tokens, 2048) * shard.v


def prompt_bytes(model: ModelConfig, tp: int, tokens: int) -> float:
    """Bytes of one device before the first token of prompts of so many tokens: weights in bfloat16, the cache, and what
    a layer holds at once. An estimate."""
    shard = Shard(model, tp)
    cache = 2 * model.n_layers * tokens * shard.kv
    layer = tokens * (2 * model.d_model + shard.q + 2 * shard.kv + shard.up + shard.f)
    return 2 * (shard.parameters(model.n_layers) + cache + layer)


def stops(points: list[Point], way: str) -> tuple[int | None, int | None]:
    """(fewest, most GPUs) on which a way is at least 2 % faster than exact; Nones where on none."""
    exact = {p.gpus: p.tokens for p in points if p.way == "none"}
    pays = [p.gpus for p in points if p.way == way and p.tokens >= 1.02 * exact[p.gpus]]
    return (min(pays), max(pays)) if pays else (None, None)
