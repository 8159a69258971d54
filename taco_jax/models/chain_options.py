"""How XLA compiles layers in chains (`overlap.py`), for training and for prompts."""

from __future__ import annotations

import os
from pathlib import Path

# How XLA on GPUs compiles chains. Every jax from 0.10.2 to 0.12 knows these options.
CHAIN_OPTIONS = {
    # The sizes up to which XLA merges products of one matrix, and collectives: chains keep their own.
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_all_reduce_combine_threshold_bytes": 0,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    # XLA puts no more beside a message than its estimate of the message's time, and its own table of collectives was
    # measured over NVLink: over a slower link most products would wait. Of a collective that the table has not, it
    # supposes 5 ms: the message starts as soon as it can and ends when it is needed.
    "xla_gpu_experimental_collective_perf_table_path": str(Path(__file__).with_name("unmeasured.pbtxt")),
}


def compiler_options(chains: int, platform: str) -> dict[str, int | str] | None:
    """Returns CHAIN_OPTIONS with chains on a GPU, else None. XLA_FLAGS have the last word."""
    if chains == 1 or platform == "cpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in CHAIN_OPTIONS.items() if f"--{name}=" not in flags}
