"""Whether layers go in chains by themselves: two where the link is slow, so that messages travel beside products.

Over NVLink two chains lose more in their smaller products than they hide (experiments/results/overlap_2gpus). Through
host memory they hide most of what sums cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from pallas_kernels.nvlink import hardware
from taco_jax.compression import tuned
from taco_jax.compression.compression import Compression

CHAINS = 2
MIN_CHAIN_BYTES = 4 << 20
"""Bytes of a chain's message as it is computed, below which its kernels' starts cost what it hides."""


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
