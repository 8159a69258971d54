"""The configuration of a training run: frozen dataclasses, every field with the sentence that `--help` shows.

`TrainConfig` is what an experiment file assigns to its module-level name `config`, what the command line overrides
(`taco_jax.config.flags`) and what a workdir keeps as `config.json`. Each dataclass checks its own fields where it is
made; `taco_jax.config.checks` has the rules between several. Nothing here starts a JAX backend.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from taco_jax.codec import AUTO, as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.compression import Compression, codec_pair, without_key
from taco_jax.config.data_sources import DataSource, check_validation, parse_sources
from taco_jax.config.lora import LoraConfig
from taco_jax.config.rules import Checked, first_and_last
from taco_jax.config.schedule import SCHEDULES
from taco_jax.errors import ConfigError, listed
from taco_jax.models.config import ModelConfig

ATTENTION = (None, "xla", "cudnn")
COMPUTE_DTYPES = ("bfloat16", "float32", "float16")
DISTRIBUTED = ("auto", "slurm", "env", "off")
REMAT = ("none", "full", "dots")
AUTO_REMAT = "auto"
TOKEN_DTYPES = ("auto", "uint16", "uint32")
OPTIMIZERS = ("adamw", "lion", "muon")
GUARDS = (None, "off", "warn", "act")
LEARNING_RATES = ("cosine", "linear", "wsd", "constant")
MOMENT_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Sizes of the three mesh axes; their product is the number of devices used."""

    PREFIX = "mesh."

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

    def check_fields(self) -> None:
        self.at_least(1, "dp", "pp", "tp")
        self.at_least(1, "devices_per_host", or_none=" for what JAX says")
        hosts, size = self.devices_per_host, self.size
        fits = hosts is None or hosts >= size or size % hosts == 0
        rule = f"must divide the {size} devices of the mesh (dp x pp x tp), else hosts' ranks are in no order; try "
        self.require(fits, "devices_per_host", rule + listed(divisors(size)))


def site_compression(config: Any, codecs: str | None = None, key: str = "codecs", **changes: Any) -> Compression:
    """Returns how a site is compressed: the config's own fields, in the codecs "FORWARD[:BACKWARD]" if some are given.

    Raises:
      ConfigError: what no `Compression` can be. It names the field of `compression`, or `key` for the codecs.
    """
    try:
        if codecs is not None:
            changes["forward"], changes["backward"] = codec_pair(codecs, key)
        return without_key(Compression.of_fields(config, **changes))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"compression.{error}") from None


@dataclasses.dataclass(frozen=True)
class CompressionConfig(Checked):
    """How the tensor-parallel messages are written as bytes."""

    PREFIX = "compression."
    LARGE = ("min_bytes",)

    forward: str = AUTO
    """Codec of the activations: auto (what the record recommends), taco, int4h,block=32... (docs/codecs.md), none."""
    backward: str = AUTO
    """Codec of the activations' gradients, likewise; none sends them exactly."""
    min_bytes: int | None = None
    """Messages below this many bytes are sent exactly; None takes the value tuned for the link."""
    algorithm: str = "auto"
    """Collective algorithm: one_shot, two_shot, hierarchical, or auto: in levels where tp spans hosts, else flat."""
    between_hosts: str | None = None
    """Codec between hosts of messages that go in levels, in both directions; None: the message's own."""
    link: str = "auto"
    """How bytes move: auto, nccl (any fabric), nvlink (peer memory, one kernel), copy (tp 2: copy engines)."""
    backward_link: str | None = None
    """How the backward messages' bytes move, likewise; None: as link says."""
    backend: str = "auto"
    """What encodes and decodes: mosaic or triton (GPU kernels), jnp, or auto, a kernel where the device has one."""
    chunks: int | None = None
    """Pieces of a message, sent one while the next is encoded; None takes the number tuned for the link, else 1."""
    exchange: str = "auto"
    """First hop of a reduction: all_to_all, ring (one permutation per other device), or auto, as tuned for the link."""
    with_product: bool = False
    """Sums over NVLink in the kernel of the product before them, where both can (tp 2 or 4, one chain, no stages)."""
    error_feedback: bool = False
    """Forward sums take along what the one before lost: for 4 bits (whole sequences, not over NVLink)."""
    backward_error_feedback: bool = False
    """Experimental: gradients' sums take along what the one before lost (as error_feedback; one chain, no stages)."""
    history: int = 16
    """Steps whose block-scale maxima set a site scale."""
    calibration_steps: int = 2
    """First steps that only measure: every site runs uncalibrated until they are over."""
    plan: dict[str, str] = dataclasses.field(default_factory=dict)
    """Codecs of single sites: PATTERN FORWARD:BACKWARD such as 'layers/mlp/*' int8h; or a plan's file, plan.json."""
    guard: str | None = None
    """What happens where a site's SNR falls: off, warn, or act (more bits); None: warn with a plan's file, else off."""
    guard_margin_db: float = 3.0
    """Decibels that a site's SNR may fall below its first ones, where no plan's file gives its bound."""
    guard_patience: int = 3
    """Measurements in a row that must fail before the guard acts or warns, and pass before it goes back."""

    def __post_init__(self):
        # The run keeps what the file says, not its place.
        if isinstance(self.plan, str | os.PathLike):
            object.__setattr__(self, "plan", plan_file.kept(self.plan))
        super().__post_init__()

    @property
    def planned(self) -> plan_file.PlanFile | None:
        """The plan of a file that `plan` holds; None where it has patterns and codecs, or nothing."""
        return plan_file.of_kept(self.plan)

    def check_fields(self) -> None:
        self.at_least(1, "history", "guard_patience")
        self.at_least(0, "calibration_steps")
        self.one_of("guard", GUARDS)
        self.above_0("guard_margin_db", more=", such as 3")
        site_compression(self)
        if self.planned is not None:
            return
        for pattern, codecs in self.plan.items():
            if not (isinstance(pattern, str) and isinstance(codecs, str)):
                raise ConfigError(
                    f"compression.plan {pattern!r}: {codecs!r}: both must be texts, such as 'layers/*': 'taco:int8h'"
                )
            site_compression(self, codecs, f"plan {pattern!r}")


@dataclasses.dataclass(frozen=True)
class PipelineConfig(Checked):
    """How microbatches go through the stages of mesh.pp > 1, and how what the stages send is written as bytes."""

    PREFIX = "pipeline."

    schedule: str = "gpipe"
    """Order of the work: gpipe, circular (several chunks of layers a stage) or 1f1b (bounded memory, recomputes)."""
    microbatches: int = 4
    """Parts of a device's batch that follow each other through the stages; more of them make the bubble smaller."""
    chunks: int = 2
    """Groups of layers on each stage of schedule=circular, which makes its bubble as many times smaller."""
    forward: str | None = None
    """Codec of activations to the next stage: tah4 (3 or 4 bits), auto...; None: auto, none where compression is."""
    backward: str | None = None
    """Codec of the activations' gradients sent back; None: auto, or none (exact) where both of compression are."""

    def check_fields(self) -> None:
        self.at_least(1, "microbatches", "chunks")
        self.one_of("schedule", SCHEDULES)
        try:
            without_key(Compression(self.forward, backward=self.backward or "none"))
        except ValueError as error:
            raise ConfigError(f"pipeline.{error}") from None


@dataclasses.dataclass(frozen=True)
class DataParallelConfig(Checked):
    """Messages of data-parallel ranks, and the part of the state that each of them holds."""

    PREFIX = "data_parallel."

    gradients: str | None = None
    """Codec of the gradients' sum over dp: sdp4 (int4h between hosts)...; None: auto, none where compression is."""
    zero1: bool = False
    """Cut the optimiser's state over dp (ZeRO-1): each rank updates its share of the weights, then all get all."""
    parameters: str = "none"
    """How zero1 sends updated weights: none (float32), bfloat16, auto, or a codec, for the change of all's copy."""
    bucket_mb: float = 256.0
    """MB (1e6 bytes, as float32) of gradients or weights that travel together; larger leaves go in as many parts."""
    overlap: bool | None = None
    """Experimental: send each layer's gradients beside the backward pass of the layer before it; None: after it all."""

    def check_fields(self) -> None:
        for key, other in (("gradients", "sdp4"), ("parameters", "bfloat16")):
            self.codec(key, others=(other, AUTO))
            value = getattr(self, key)
            codec = as_codec(None if value in (other, AUTO) else value)
            rule = "has one scale a token, and gradients and weights have no tokens; use 'int8h'"
            self.require(not codec.per_token, key, rule)
            rule = "gradients and weights have no key to draw noise with; use rounding=nearest"
            self.require(codec.rounding == "nearest", key, rule)
        rule = "without data_parallel.zero1 no weights are sent; set data_parallel.zero1, or leave it at 'none'"
        self.require(self.parameters in ("none", AUTO) or self.zero1, "parameters", rule)
        self.above_0("bucket_mb", more=", for example 256")


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Where the tokens come from."""

    PREFIX = "data."

    train: str | tuple[str, ...] = "austen"
    """Source: austen, a text (.txt, .txt.xz) or token file (.bin, .npy, .idx), a folder; or several, a:0.7 b:0.3."""
    validation: str | None = None
    """One source for validation; None: the sources' own validation parts, else the end of each is held out."""
    validation_fraction: float = 0.05
    """Share of a source that is held out where it has no validation part and data.validation is None."""
    sequence_length: int = 256
    """Tokens per sequence that the model predicts."""
    document_mask: bool = False
    """Keep attention inside documents, which end with end_token_id; learned positions start again in each."""
    end_token_id: int | None = None
    """Token that ends a document, for document_mask; None takes it from meta.json of the folders of data.train."""
    token_dtype: str = "auto"
    """Token type of .bin files: uint16, uint32 or auto (.u16.bin and .u32.bin say it, else by vocabulary size)."""
    prefetch: int = 2
    """Batches that are read ahead while a step runs; 0 reads in the training thread."""

    def __post_init__(self):
        # JSON has lists. One source is its name, as configurations of one source always were.
        if isinstance(self.train, list | tuple):
            object.__setattr__(self, "train", self.train[0] if len(self.train) == 1 else tuple(self.train))
        super().__post_init__()

    @property
    def sources(self) -> tuple[DataSource, ...]:
        return parse_sources(self.train)

    def check_fields(self) -> None:
        parse_sources(self.train)
        check_validation(self.validation)
        self.require(0 < self.validation_fraction < 1, "validation_fraction", "must be between 0 and 1")
        self.at_least(1, "sequence_length")
        self.at_least(0, "end_token_id", or_none=" to take that of the data's folder")
        self.one_of("token_dtype", TOKEN_DTYPES)
        self.at_least(0, "prefetch")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The optimiser, and its learning rate over the steps."""

    PREFIX = "optimizer."

    learning_rate: float = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: float | None = None
    """Learning rate at the last step; None: learning_rate x min_learning_rate_ratio."""
    min_learning_rate_ratio: float = 0.1
    """Share of learning_rate that is left at the last step where min_learning_rate is None."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises linearly."""
    beta1: float = 0.9
    """Decay of the gradient's running mean; lion's share of that mean in its update."""
    beta2: float = 0.95
    """Decay of the squared gradient's running mean; lion's decay of the gradient's running mean."""
    eps: float = 1e-8
    """Added to the root of the squared gradient's mean."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors (norms, biases) have none."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this global norm; None does not clip."""
    name: str = "adamw"
    """Optimiser: adamw, lion (one moment) or muon (matrices of layers; adamw for embeddings, head, norms, biases)."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine, linear, wsd (constant, then linear at the end) or constant."""
    decay_fraction: float = 0.2
    """Share of the steps, the last ones, in which the learning rate falls with schedule=wsd."""
    momentum: float = 0.95
    """Decay of the gradient's running mean of matrices with name=muon."""
    moment_dtype: str = "float32"
    """Type in which the gradient's running mean is kept: float32, or bfloat16 for half the memory."""

    @property
    def floor(self) -> float:
        """The learning rate at the last step."""
        given = self.min_learning_rate
        return self.learning_rate * self.min_learning_rate_ratio if given is None else given

    def check_fields(self) -> None:
        self.one_of("name", OPTIMIZERS)
        self.one_of("schedule", LEARNING_RATES)
        self.one_of("moment_dtype", MOMENT_DTYPES)
        self.above_0("learning_rate", "eps")
        self.at_least(0, "warmup_steps")
        self.require(0 < self.decay_fraction <= 1, "decay_fraction", "must be above 0 and at most 1")
        for key in ("min_learning_rate", "weight_decay"):
            value = getattr(self, key)
            self.require(value is None or 0 <= value < math.inf, key, "must be 0 or more and finite")
        rule = "must be from 0 to 1, the share of learning_rate at the last step"
        self.require(0 <= self.min_learning_rate_ratio <= 1, "min_learning_rate_ratio", rule)
        for key in ("beta1", "beta2", "momentum"):
            self.require(0 <= getattr(self, key) < 1, key, "must be at least 0 and below 1")
        rule = (
            f"must not exceed learning_rate={self.learning_rate}; None makes it a share of that, "
            f"min_learning_rate_ratio={self.min_learning_rate_ratio}"
        )
        self.require(self.floor <= self.learning_rate, "min_learning_rate", rule)
        clip = self.clip_norm
        self.require(clip is None or clip > 0, "clip_norm", "must be above 0, or None for no clipping")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Contents and intervals of checkpoints."""

    PREFIX = "checkpoint."

    enabled: bool = True
    """Save checkpoints; without it a run cannot be resumed."""
    every: int = 1000
    """Steps between checkpoints; the last step is always saved."""
    keep: int | None = 3
    """Checkpoints kept; older ones are deleted. None keeps all."""
    resume_step: int | None = None
    """Step to resume from; None takes the latest. Later checkpoints of the workdir are set aside, not deleted."""

    def check_fields(self) -> None:
        self.at_least(1, "every")
        self.at_least(1, "keep", or_none=" to keep all")


@dataclasses.dataclass(frozen=True)
class MetricsConfig(Checked):
    """Measurements and where they go."""

    PREFIX = "metrics."

    every: int = 1
    """Steps between step lines and records in metrics.jsonl."""
    snr_every: int = 0
    """Steps between measurements of SNR, clipped and flushed share of every site; 0 never."""
    tensorboard: bool = False
    """Also write TensorBoard event files (extra 'tensorboard')."""
    wandb: bool = False
    """Also log to Weights & Biases (extra 'wandb'); a resumed run goes on as the same run there."""
    run_name: str | None = None
    """Name of the run in TensorBoard and Weights & Biases; None: that of the workdir's folder."""

    def check_fields(self) -> None:
        self.at_least(1, "every")
        self.at_least(0, "snr_every")
        name = self.run_name
        rule = "must be a name of 1 to 120 characters without / and not . or .., since it names a folder too"
        fits = name is None or (0 < len(name) <= 120 and "/" not in name and name.isprintable() and name.strip("."))
        self.require(bool(fits), "run_name", rule)


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked):
    """Validation loss."""

    PREFIX = "evaluation."

    every: int = 500
    """Steps between validations; the last step is always validated."""
    batches: int | None = None
    """Validation batches each time; None takes all of the validation data, 0 switches validation off."""

    def check_fields(self) -> None:
        self.at_least(1, "every")
        self.require(self.batches is None or self.batches >= 0, "batches", "must be 0 or more, or None for all")


@dataclasses.dataclass(frozen=True)
class TrainConfig(Checked):
    """Train a language model with compressed tensor parallelism."""

    LARGE = ("seed",)

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
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    """Low-rank adapters."""
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
    init_from: str | None = None
    """Start from weights: a Hugging Face folder, a .gguf file or a run (runs/x[@STEP]), with its model's shape."""
    init_optimizer: bool = False
    """With a run as init_from, take its optimiser's moments too; the learning-rate schedule starts anew in any case."""
    workdir: str = "runs/train"
    """Folder for config.json, metrics.jsonl, loss.png and checkpoints; an existing one is resumed."""
    log_file: str | None = None
    """File that the run's lines are appended to as well, by the first process; relative to the current folder."""
    profile: str | None = None
    """START:STOP: record a trace of these steps, both included, in the workdir's folder profile, for xprof."""
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
    remat: str = "auto"
    """What the backward pass recomputes: none, dots (all but products), full, or auto: dots with stages, else none."""
    chains: int | str = AUTO
    """Parts of a microbatch side by side in each layer: one sends while another computes; auto: 2 on a slow link."""
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

    def check_fields(self) -> None:
        self.at_least(1, "steps", "global_batch", "accumulation")
        counts = self.chains == AUTO or (not isinstance(self.chains, str) and self.chains >= 1)
        self.require(counts, "chains", "must be at least 1, or auto: two where the link is slow")
        self.at_least(1, "max_skipped_in_a_row", "distributed_timeout", "heartbeat_timeout")
        self.at_least(1, "stop_after", "loss_chunk", or_none="")
        self.at_least(0, "seed")
        self.require(self.seed < 1 << 32, "seed", "must be below 2**32")
        self.one_of("compute_dtype", COMPUTE_DTYPES)
        self.one_of("remat", (AUTO_REMAT, *REMAT))
        self.one_of("attention_implementation", ATTENTION)
        self.one_of("distributed", DISTRIBUTED)
        self.above_0("gpu_memory_gb")
        rule = "takes the optimiser of the run that init_from names; set init_from=runs/x, or leave it out"
        self.require(not self.init_optimizer or self.init_from is not None, "init_optimizer", rule)
        if self.profile is not None:
            try:
                first, _ = first_and_last(self.profile)
            except ValueError as error:
                self.require(False, "profile", str(error))
            stop = min(self.steps, self.stop_after or self.steps)
            self.require(first <= stop, "profile", f"the run ends at step {stop}; trace steps up to that")
        self.require(self.log_file != "", "log_file", "must be the path of a file")
        rule = f"adapters (lora.rank={self.lora.rank}) have an optimiser of their own, which starts anew; leave it out"
        self.require(not self.init_optimizer or self.lora.rank is None, "init_optimizer", rule)


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
