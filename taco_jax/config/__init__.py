"""The configuration of a training run, and the command lines.

settings: the dataclasses, a sentence for every field. checks: the rules between fields. cli: flags, errors in one
line and exit codes of all commands. schedule: the order of work in pipeline stages.
"""

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
    codec_pair,
    flatten,
    get,
    keys,
    microbatch,
    parse_devices,
    pipeline_schedule,
    sequence_parallel,
    site_compression,
    to_dict,
    with_codecs,
    with_compression,
)
from taco_jax.errors import ConfigError

__all__ = [
    "CheckpointConfig",
    "CompressionConfig",
    "ConfigError",
    "DataConfig",
    "DataParallelConfig",
    "EvalConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "TrainConfig",
    "codec_pair",
    "flatten",
    "get",
    "keys",
    "microbatch",
    "parse_devices",
    "pipeline_schedule",
    "sequence_parallel",
    "site_compression",
    "to_dict",
    "with_codecs",
    "with_compression",
]
