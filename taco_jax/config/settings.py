"""The configuration of a training run: frozen dataclasses, every field with the sentence that `--help` shows.

`TrainConfig` is what an experiment file assigns to its module-level name `config`, what the command line overrides
(`taco_jax.config.cli`) and what a workdir keeps as `config.json`. `taco_jax.config.checks` has the rules between
fields. Nothing here starts a JAX backend.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from taco_jax.compression.compression import Compression
from taco_jax.config.schedule import Schedule
from taco_jax.errors import ConfigError
from taco_jax.models.config import ModelConfig

MAX_EMULATED = 4096  # devices on the CPU: each takes threads, and XLA starts all of them
# Tokens of a sequence from which sequence parallelism is on by itself. It saves the same share of the memory at any
# length (experiments/results/sequence_parallel), which is worth little where activations are small, and its messages
# are more and smaller: what they cost GPUs in time has not been measured.
LONG_SEQUENCE = 2048


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the three mesh axes; their product is the number of devices used."""

    dp: int = 1
    """Data-parallel axis: copies of the model that each see another part of the batch."""
    pp: int = 1
    """Pipeline-parallel axis: stages, groups of layers on different devices."""
    tp: int = 1
    """Tensor-parallel axis: devices that share every layer and exchange activations."""
    devices_per_host: int | None = None
    """Consecutive devices that count as one host where messages go in levels; None: as JAX says."""

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """How the tensor-parallel messages are written as bytes."""

    forward: str = "taco"
    """Codec of the activations: taco, int8h... (docs/codecs.md), or with fields changed, int4h,block=32; or none."""
    backward: str = "taco"
    """Codec of the activations' gradients, from the same presets; none sends them exactly."""
    min_bytes: int | None = None
    """Messages below this many bytes are sent exactly; None takes the value tuned for the link."""
    algorithm: str = "auto"
    """Collective algorithm: one_shot, two_shot, hierarchical, or auto: in levels where tp spans hosts, else flat."""
    between_hosts: str | None = None
    """Codec between hosts of messages that go in levels, in both directions; None: the message's own."""
    link: str = "auto"
    """How bytes move: auto, nccl (any fabric) or nvlink (peer memory, one kernel)."""
    backend: str = "auto"
    """What encodes and decodes: mosaic or triton (GPU kernels), jnp, or auto, a kernel where the device has one."""
    chunks: int | None = None
    """Pieces of a message, sent one while the next is encoded; None takes the number tuned for the link, else 1."""
    exchange: str = "auto"
    """First hop of a reduction: all_to_all, ring (one permutation per other device), or auto, as tuned for the link."""
    with_product: bool = False
    """Sums over NVLink in the kernel of the product before them, where both can (tp 2 or 4, one chain, no stages)."""
    error_feedback: bool = False
    """Forward sums take along what the one before lost: for 4 bits (one chain, whole sequences, not over NVLink)."""
    history: int = 16
    """Steps whose block-scale maxima set a site scale."""
    calibration_steps: int = 2
    """First steps that only measure: every site runs uncalibrated until they are over."""
    plan: dict[str, str] = dataclasses.field(default_factory=dict)
    """Codecs of single sites: pairs PATTERN FORWARD:BACKWARD such as 'layers/mlp/*' int8h:int6h; first match wins."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How microbatches go through the stages of mesh.pp > 1, and how what the stages send is written as bytes."""

    schedule: str = "gpipe"
    """Order of the work: gpipe, circular (several chunks of layers a stage) or 1f1b (bounded memory, recomputes)."""
    microbatches: int = 4
    """Parts of a device's batch that follow each other through the stages; more of them make the bubble smaller."""
    chunks: int = 2
    """Groups of layers on each stage of schedule=circular, which makes its bubble as many times smaller."""
    forward: str | None = None
    """Codec of activations to the next stage: tah4 (3 or 4 bits)...; None: int8_token, none where compression is."""
    backward: str | None = None
    """Codec of the activations' gradients sent back; None: e4m3h, or none (exact) where both of compression are."""


@dataclasses.dataclass(frozen=True)
class DataParallelConfig:
    """What data-parallel ranks send each other, and what each of them holds."""

    gradients: str | None = None
    """Codec of the gradients' sum over dp: sdp4 (int4h between hosts)...; None: int8h, none where compression is."""
    zero1: bool = False
    """Cut the optimiser's state over dp (ZeRO-1): each rank updates its share of the weights, then all get all."""
    parameters: str = "none"
    """How zero1 sends updated weights: none (float32), bfloat16, or a codec, for the change of all ranks' copy."""
    bucket_mb: float = 256.0
    """MB (1e6 bytes, as float32) of gradients or weights that travel together; larger leaves go in as many parts."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    train: str = "austen"
    """'austen' (the packaged corpus), a text file (.txt, .txt.xz: read as bytes) or a token file (.bin)."""
    validation: str | None = None
    """The same for validation; None holds out the end of the training data."""
    validation_fraction: float = 0.05
    """Share of the training data that is held out when no validation file is named."""
    sequence_length: int = 256
    """Tokens per sequence that the model predicts."""
    token_dtype: str = "auto"
    """Token type of .bin files: uint16, uint32 or auto (.u16.bin and .u32.bin say it, else by vocabulary size)."""
    prefetch: int = 2
    """Batches that are read ahead while a step runs; 0 reads in the training thread."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and a cosine."""

    learning_rate: float = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: float | None = None
    """Learning rate at the last step; None: learning_rate x min_learning_rate_ratio."""
    min_learning_rate_ratio: float = 0.1
    """Share of learning_rate that is left at the last step where min_learning_rate is None."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly."""
    beta1: float = 0.9
    """Decay of the gradient's running mean."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean."""
    eps: float = 1e-8
    """Added to the root of the squared gradient's mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None does not clip."""

    @property
    def floor(self) -> float:
        """The learning rate at the last step."""
        given = self.min_learning_rate
        return self.learning_rate * self.min_learning_rate_ratio if given is None else given


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and how often."""

    enabled: bool = True
    """Save checkpoints; without it a run cannot be resumed."""
    every: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: int | None = 3
    """Checkpoints kept; older ones are deleted. None keeps all."""
    resume_step: int | None = None
    """Step to resume from; None takes the latest. Later checkpoints of the workdir are set aside, not deleted."""


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """What is measured and where it goes."""

    every: int = 1
    """Steps between step lines and records in metrics.jsonl."""
    snr_every: int = 0
    """Steps between measurements of SNR, clipped and flushed share of every site; 0 never."""
    tensorboard: bool = False
    """Also write TensorBoard event files (extra 'tensorboard')."""
    wandb: bool = False
    """Also log to Weights & Biases (extra 'wandb')."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation loss."""

    every: int = 500
    """Steps between validations; the last step is always validated."""
    batches: int | None = None
    """Validation batches each time; None takes all of the validation data, 0 switches validation off."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Train a language model with compressed tensor parallelism."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The model's shape."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """How the model is spread over devices."""
    compression: CompressionConfig = dataclasses.field(default_factory=CompressionConfig)
    """How tensor-parallel messages are compressed."""
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    """How stages work and send; used with mesh.pp above 1."""
    data_parallel: DataParallelConfig = dataclasses.field(default_factory=DataParallelConfig)
    """Data parallelism: gradients, optimiser state, weights."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    """Training and validation data."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """Optimiser and learning-rate schedule."""
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    """Checkpoints."""
    metrics: MetricsConfig = dataclasses.field(default_factory=MetricsConfig)
    """Metrics."""
    evaluation: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    """Validation."""
    global_batch: int = 32
    """Sequences per optimiser step, over all devices and microbatches."""
    accumulation: int = 1
    """Microbatches whose gradients are added before one optimiser step."""
    steps: int = 1000
    """Optimiser steps of the whole run; the learning-rate schedule ends here."""
    stop_after: int | None = None
    """Stop and save at this step, with the schedule unchanged."""
    seed: int = 0
    """Seed of the parameters and of the order of the data."""
    workdir: str = "runs/train"
    """Folder for config.json, metrics.jsonl, loss.png and checkpoints; an existing one is resumed."""
    devices: str | None = None
    """'cpu:8' emulates eight devices on the CPU, in each process; 'cpu', 'gpu' or None take what JAX finds."""
    distributed: str = "auto"
    """Launcher of several processes: slurm, env (JAX_* or torchrun's variables), auto (whichever is there) or off."""
    distributed_timeout: int = 300
    """Seconds in which all processes must have come, and then again must have passed the start-up self-test."""
    heartbeat_timeout: int = 60
    """Seconds of silence after which a process counts as dead and the others stop; one that is killed shows at once."""
    deterministic: bool = False
    """Ask XLA for results that repeat bit for bit on GPU (the CPU's always do)."""
    compute_dtype: str = "bfloat16"
    """Type of activations and of weights at use: bfloat16, float32 or float16; master weights are float32."""
    sequence_parallel: bool | None = None
    """Keep activations between layers cut along the sequence; None: where it pays, which the dry run says, with why."""
    remat: str = "none"
    """What the backward pass recomputes: none, dots (all but matrix products) or full; never communication."""
    chains: int = 1
    """Parts of a microbatch that go through each layer side by side: one sends while another computes; 1 is off."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once in the loss; None lets the model choose."""
    attention_implementation: str | None = None
    """Implementation of jax.nn.dot_product_attention: xla, cudnn, or None to let the model choose."""
    max_skipped_in_a_row: int = 5
    """Non-finite steps in a row after which the run stops."""
    dry_run: bool = False
    """Print the resolved config, memory per device and every communication site, and allocate nothing."""
    gpu_memory_gb: float = 80.0
    """Memory of one device, in GB of 1e9 bytes, that the dry run compares with."""


def microbatch(config: TrainConfig) -> int:
    """Sequences that go through a layer at once on one device, all chains together."""
    schedule = pipeline_schedule(config)
    parts = config.mesh.dp * config.accumulation * (1 if schedule is None else schedule.microbatches)
    return config.global_batch // parts


def sequence_parallel(config: TrainConfig) -> tuple[bool, str]:
    """Whether activations between layers are cut along the sequence, and why.

    A psum_scatter and an all_gather then take the place of each all-reduce, with its bytes; what a rank sends to the
    next stage, and what the backward pass keeps of norms and residuals, is 1 / tp. With remat that is hardly anything:
    it keeps what messages brought, so that none is sent twice, and what an all_gather brings is whole. Where tp is 2 a
    value is quantised twice instead of once.
    """
    length, tp = config.data.sequence_length, config.mesh.tp
    if config.sequence_parallel is not None:
        return config.sequence_parallel, "as configured"
    if tp == 1:
        return False, "tp is 1"
    if length % tp:
        return False, f"tp {tp} does not divide the {length} tokens of a sequence"
    if config.chains > 1:
        return False, "chains put messages beside products for whole sequences only"
    if config.compression.with_product:
        return False, "sums in the kernels of their products are of whole sequences"
    if config.compression.error_feedback:
        return False, "sums with error feedback are of whole sequences"
    if config.mesh.pp > 1:
        return True, f"each of the {tp} ranks of a stage sends 1/{tp} of its activations"
    if config.remat != "none":
        return False, f"remat {config.remat} leaves little memory to save"
    if length < LONG_SEQUENCE:
        return False, f"{length} tokens a sequence, below {LONG_SEQUENCE}"
    return True, f"{length} tokens a sequence: what is kept between layers takes 1/{tp} of the memory"


def pipeline_schedule(config: TrainConfig) -> Schedule | None:
    """The schedule of a run's pipeline; None where mesh.pp is 1. Only circular has several chunks."""
    p, stages = config.pipeline, config.mesh.pp
    chunks = p.chunks if p.schedule == "circular" else 1
    return None if stages == 1 else Schedule(p.schedule, stages, p.microbatches, chunks)


def site_compression(config: CompressionConfig, codecs: str | None = None, **changes) -> Compression:
    """How a site is compressed: the config's own fields, in the codecs "FORWARD[:BACKWARD]" if some are given.

    Raises:
      ValueError: as `Compression`.
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(Compression)
             if hasattr(config, field.name)}  # fmt: skip
    if codecs is not None:
        changes["forward"], changes["backward"] = codec_pair(codecs)
    return Compression(**given | changes)


def codec_pair(text: str) -> tuple[str, str]:
    """The (forward, backward) codecs of a plan entry: "int8h:int6h", or one for both directions."""
    forward, _, backward = text.partition(":")
    return forward, backward or forward


def with_compression(config: TrainConfig, codecs: str) -> TrainConfig:
    """The config with the tensor-parallel codecs FORWARD:BACKWARD (one name: both); none makes every axis exact.

    A plan, which gives single sites their own, stays unless the codecs are none.
    """
    forward, backward = codec_pair(codecs)
    compression = dataclasses.replace(config.compression, forward=forward, backward=backward)
    if (forward, backward) != ("none", "none"):
        return dataclasses.replace(config, compression=compression)
    return dataclasses.replace(
        config,
        compression=dataclasses.replace(compression, plan={}, between_hosts=None, error_feedback=False),
        pipeline=dataclasses.replace(config.pipeline, forward="none", backward="none"),
        data_parallel=dataclasses.replace(config.data_parallel, gradients="none", parameters="none"),
    )


def with_codecs(config: TrainConfig) -> TrainConfig:
    """The config with a codec in the place of each None. Codecs none over tp alone would be no exact run."""
    exact = (config.compression.forward, config.compression.backward) == ("none", "none")

    def fill(part: Any, **codecs: str) -> Any:
        left = {key: "none" if exact else codec for key, codec in codecs.items() if getattr(part, key) is None}
        return dataclasses.replace(part, **left)

    return dataclasses.replace(
        config,
        pipeline=fill(config.pipeline, forward="int8_token", backward="e4m3h"),
        data_parallel=fill(config.data_parallel, gradients="int8h"),
    )


def parse_devices(devices: str | None) -> tuple[str | None, int | None]:
    """(platform, count) of a `devices` value: "cpu:8" -> ("cpu", 8), "gpu" -> ("gpu", None), None -> (None, None)."""
    if devices is None:
        return None, None
    match = re.fullmatch(r"(cpu|gpu|cuda)|cpu:([1-9]\d*)", devices)
    if not match:
        raise ConfigError(f"devices={devices!r}: must be 'cpu:N' (N emulated devices), 'cpu' or 'gpu'; try 'cpu:8'")
    count = int(match[2]) if match[2] else None
    if count is not None and count > MAX_EMULATED:
        raise ConfigError(f"devices={devices!r}: at most {MAX_EMULATED} devices are emulated; try 'cpu:8'")
    return (match[1] or "cpu").replace("gpu", "cuda"), count


def get(config: Any, key: str) -> Any:
    """The value of a dotted key, such as "mesh.tp"."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, as `config.json` has it."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"mesh": {"tp": 4}} -> {"mesh.tp": 4}; a dict of free keys (a plan) stays one value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        nested = isinstance(value, dict) and not name == "plan"
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def keys(config: Any, prefix: str = "") -> list[str]:
    """Every dotted key of a config dataclass."""
    return list(flatten(to_dict(config)))
