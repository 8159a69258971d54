"""Sums of two GPUs of one process, whose copy engines bring the wires beside whatever else is computed.

    encode -> the other rank's copy engine writes the wire here -> the sum of both wires, in float32 and rank order

The bytes and the values are those of the exchange (`all_reduce.py`, one-shot of two ranks), bit for bit. A copy engine
takes no multiprocessor: products that need nothing of the sum run at their full speed meanwhile. So does the gradient
of a weight, which waits for nothing, beside the sum of an input's gradient. Where nothing runs beside it, one kernel
over NVLink (`nvlink.py`) is faster.

In the program the copy is a collective-permute. XLA's options `COMPILER_OPTIONS` make it such a copy, where all ranks
are of one process and reach each other's memory. Else, and without the options, NCCL sends the wire by a kernel, beside
which products are slower by more than is won (`experiments/results/step_nvlink_2gpus`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax import lax

from pallas_kernels import KernelUnavailableError
from taco_jax.collectives.async_collective import AsyncCollective, Hopping
from taco_jax.collectives.manual_region import axis_tuple, permute, same_on_all_ranks, to_varying
from taco_jax.collectives.message import Message
from taco_jax.compression import dispatch

# Every jax from 0.10.2 to 0.12 knows it. Plain peer memory: neither multicast nor symmetric memory.
COMPILER_OPTIONS = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def takes(message: Message, x: jax.Array) -> bool:
    """Returns whether a sum's wires are copied. Raises KernelUnavailableError where that is forced and cannot be."""
    if message.link != "copy":
        return False
    reason = why_unsupported(message, x)
    found = ("nccl", reason) if reason else ("copy", "copy engines bring the wire beside other work")
    dispatch.note(message.codec, "all_reduce", found)
    if reason:
        raise KernelUnavailableError(
            f"link 'copy' cannot sum codec {message.codec.name!r}: {reason}; use link 'auto' or 'nccl'"
        )
    return True


def why_unsupported(message: Message, x: jax.Array) -> str | None:
    """Returns why a sum's wires cannot be copied, None where they can."""
    if message.ranks != 2 or message.local:
        return f"it is for two ranks of one host, not {message.ranks}" + (" on several" if message.local else "")
    if len(axis_tuple(message.axis)) != 1:
        return f"it goes over the axes {message.axis}, and it is for one"
    if message.compression.algorithm not in ("auto", "one_shot"):
        return f"algorithm {message.compression.algorithm!r} has two hops"
    return None


def start(message: Message, x: jax.Array, exponent, key, *, record: bool = True) -> AsyncCollective:
    """The sum of x over two ranks, its hop started: varying -> invarying, x's shape and dtype, with its measure.

    record: the sum is listed in the site table.
    """
    return AsyncCollective(_exchange(message, x, exponent, key, record), 1)


def record_pieces(message: Message, x, elements: Sequence[int]) -> None:
    """Lists the sum of x that goes in pieces of so many elements."""
    message = dataclasses.replace(message, algorithm="one_shot", why="that of a copy")
    message.record("psum", x.size, x.dtype, [("collective-permute", message.codec.wire_bytes(n)) for n in elements])


def _exchange(message: Message, x: jax.Array, exponent, key, record: bool) -> Hopping:
    (axis,), codec = axis_tuple(message.axis), message.codec
    x_S = to_varying(x, axis).reshape(-1)
    geometry = dispatch.Geometry(x.size, 1, x.size)
    wires, measure = dispatch.encode(
        codec, geometry, x_S, exponent, message.key(key, 0, 0), with_stats=message.with_stats, backend=message.backend
    )
    own = wires[0]
    (received,) = yield [permute(own, axis, ((0, 1), (1, 0)))]
    y = dispatch.sum_decode_apart(
        codec, own, received, lax.axis_index(axis), x.size, dtype=x.dtype, exponent=exponent, backend=message.backend
    )
    if record:
        record_pieces(message, x, [x.size])
    return same_on_all_ranks(y.reshape(x.shape), axis), measure
