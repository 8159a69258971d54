"""The configuration of a training run, and the command lines.

settings: the dataclasses, a sentence for every field, each with its own rules (rules: those that several share).
checks: the rules between them. derived: settings that follow from others. schedule: the order of work in pipeline
stages. flags: a flag for every field. cli: what all commands run under, errors in one line and exit codes.
device_selection: the value of `--devices`.
"""

from taco_jax.config.derived import (
    auto_chains,
    chains,
    flatten,
    get,
    keys,
    microbatch,
    overlap,
    pipeline_schedule,
    remat,
    sequence_parallel,
    to_dict,
    with_codecs,
    with_compression,
)
from taco_jax.config.device_selection import parse_devices
from taco_jax.config.lora import LoraConfig
from taco_jax.config.settings import (
    CheckpointConfig,
    CompressionConfig,
    DataConfig,
    DataParallelConfig,
    EvalConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
    site_compression,
)
from taco_jax.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "CompressionConfig",
    "ConfigError",
    "DataConfig",
    "DataParallelConfig",
    "EvalConfig",
    "LoraConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "TrainConfig",
    "auto_chains",
    "flatten",
    "get",
    "keys",
    "microbatch",
    "overlap",
    "parse_devices",
    "pipeline_schedule",
    "chains",
    "remat",
    "sequence_parallel",
    "site_compression",
    "to_dict",
    "with_codecs",
    "with_compression",
]
