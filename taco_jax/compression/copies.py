"""The rule by which copy engines bring sums between two GPUs that NVLink joins, where the link is left open.

Sums of input gradients are copied: the products of weights' gradients wait for nothing and go beside. Measured in
experiments/results/step_nvlink_2gpus. The trainer (`taco_jax.train.links`) and the forecast ask here.
"""

from __future__ import annotations

import dataclasses

from taco_jax.compression.compression import FEEDBACK_KEYS, Compression

MIN_COPY_BYTES = 32 << 20
"""Bytes of a gradient as it is computed, below which its sum takes one kernel: copies were measured at 112 MiB, and the
host's part of one, where it waits for the other GPU's thread, does not get shorter with the message."""


def why_other_mesh(tp: int, devices: int) -> str | None:
    """Returns why copies are not for such a mesh; None where they are."""
    if (tp, devices) != (2, 2):
        return f"copies were measured at tp 2 on 2 devices, and this is tp {tp} on {devices}"
    return None


def why_other_step(chains: int, sequence_parallel: bool, adapters: bool, nbytes: int) -> str | None:
    """Returns why a step's sums are not copied; None where they are. nbytes: of a gradient as it is computed."""
    if chains > 1 or sequence_parallel:
        return "copies are for whole sequences in one chain"
    if adapters:
        return "adapters alone have no product beside which a copy could go"
    if nbytes < MIN_COPY_BYTES:
        return f"a gradient's {nbytes:,} bytes are below {MIN_COPY_BYTES:,}"
    return None


def with_copies(compression: Compression | None, forward: bool = False) -> Compression | None:
    """Returns a site's compression with its gradients' sums copied, and those of the forward pass if asked for; as it
    is where it says its links itself, or has what copies cannot do."""
    c = compression
    if c is None or c.link != "auto" or c.backward_link is not None or c.with_product or c.is_exact:
        return c
    if c.algorithm not in ("auto", "one_shot") or any(getattr(c, key) for key in FEEDBACK_KEYS):
        return c
    return dataclasses.replace(c, link="copy" if forward else "auto", backward_link="copy")
