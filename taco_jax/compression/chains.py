"""Layers in chains: where there are two by themselves, so that messages travel beside products; how XLA compiles them.

Over NVLink two chains lose more in their smaller products than they hide (experiments/results/overlap_2gpus). Through
host memory they hide most of what sums cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels.nvlink import hardware
from taco_jax.compression import tuned
from taco_jax.compression.compression import Compression

CHAINS = 2
MIN_CHAIN_BYTES = 4 << 20
"""Bytes of a chain's message as it is computed, below which its kernels' starts cost what it hides."""


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


def slow_link(device_kind: str = "") -> str | None:
    """Returns why messages between this host's GPUs are slow, None where they go over NVLink, as far as is known.

    It asks the driver's library and the environment, and starts no backend.
    """
    return hardware.missing(device_kind)


def on_cpu(devices: str | None) -> bool:
    """Returns whether a `--devices` value, or the environment, names the CPU."""
    named = devices or os.environ.get("JAX_PLATFORMS", "")
    return named.partition(":")[0].partition(",")[0] == "cpu"


def least_bytes(compressions: Iterable[Compression | None], ranks: int, device: Any = None) -> int:
    """Returns the least bytes of a chain's message with which it pays: all sums that are compressed stay so.

    device: None where it is not known yet; then values that were tuned for it are left out.
    """
    found = [MIN_CHAIN_BYTES]
    for compression in compressions:
        if compression is None or compression.is_exact:
            continue
        least = compression.min_bytes
        if least is None and device is not None:
            least = tuned.default_min_bytes(compression.codecs[0].name, ranks, device, compression.link)
        if least is not None and least < tuned.NEVER:
            found.append(least)
    return max(found)


def compiler_options(chains: int, platform: str, gradients: bool = False) -> dict[str, int | str] | None:
    """Returns CHAIN_OPTIONS with chains on a GPU, else None. XLA_FLAGS have the last word.

    gradients: layers' gradients travel beside the backward pass. XLA is to suppose long messages for these too; what it
    merges of them is to be one message.
    """
    if platform == "cpu" or not (chains > 1 or gradients):
        return None
    options = CHAIN_OPTIONS
    if chains == 1:
        options = {name: value for name, value in options.items() if name.endswith("perf_table_path")}
    return unless_in_flags(options)


def unless_in_flags(options: Mapping[str, int | str]) -> dict[str, int | str]:
    """Returns XLA's options without those that XLA_FLAGS have."""
    flags = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in options.items() if f"--{name}=" not in flags}
