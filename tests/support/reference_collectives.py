"""A model of every collective in numpy: rows of x_P are the ranks' inputs.

Each returns the ranks' outputs and the messages, (opcode, uint8 elements of the output on one device).
"""

import math

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def model_two_shot(ref, x_P, exponent):
    p, size = len(x_P), x_P[0].size
    n = ref.block * math.ceil(math.ceil(size / ref.block) / p)
    chunks = np.zeros((p, p * n), np.float32)
    chunks[:, :size] = x_P.reshape(p, -1)
    chunks = chunks.reshape(p, p, n)
    parts = []
    for owner in range(p):
        total = model_sum(ref, chunks[:, owner], owner, exponent)
        parts.append(ref.from_blocks(ref.encode_blocks(total, exponent)[1], n))
    y = np.concatenate(parts)[:size].reshape(x_P[0].shape)
    return [y] * p, [("all-to-all", p * ref.wire_bytes(n)), ("all-gather", p * ref.wire_bytes(n))]


def model_sum(ref, terms, owner, exponent):
    total = None
    for rank, term in enumerate(terms):  # float32, in rank order; the owner's own term is not quantised
        z = ref.to_blocks(term)
        z = z if rank == owner else ref.encode_blocks(z, exponent)[1]
        total = z if total is None else total + z
    return total


def model_one_shot(ref, x_P, exponent):
    total = model_sum(ref, x_P, None, exponent)
    y = ref.from_blocks(total, x_P[0].size).reshape(x_P[0].shape)
    return [y] * len(x_P), [("all-gather", len(x_P) * ref.wire_bytes(x_P[0].size))]


def model_hierarchical(inner, outer, x_P, local, exponent):
    """The all-reduce in levels: `local` ranks on a host, references of both codecs."""
    p, size = len(x_P), x_P[0].size
    hosts, block = p // local, max(inner.block, outer.block)
    n = block * math.ceil(math.ceil(size / block) / p)
    shares = np.zeros((p, p * n), np.float32)
    shares[:, :size] = x_P.reshape(p, -1)
    shares = shares.reshape(p, local, hosts, n)
    parts = []
    for l in range(local):
        of_hosts = [
            np.concatenate([
                inner.from_blocks(model_sum(inner, shares[h * local : (h + 1) * local, l, j], l, exponent), n)
                for j in range(hosts)
            ])
            for h in range(hosts)
        ]  # fmt: skip
        if hosts == 2:
            total = outer.from_blocks(model_sum(outer, of_hosts, None, exponent), hosts * n)
            parts += [inner.round_trip(part, exponent) for part in total.reshape(hosts, n)]
            continue
        for j in range(hosts):
            total = model_sum(outer, [part.reshape(hosts, n)[j] for part in of_hosts], j, exponent)
            parts.append(outer.from_blocks(outer.encode_blocks(total, exponent)[1], n))
    y = np.concatenate(parts)[:size].reshape(x_P[0].shape)
    inside = [
        ("all-to-all", p * inner.wire_bytes(n)),
        ("all-gather", p * (inner if hosts == 2 else outer).wire_bytes(n)),
    ]
    if hosts == 2:
        return [y] * p, inside, [("all-gather", hosts * outer.wire_bytes(hosts * n))]
    wires = hosts * outer.wire_bytes(n)
    return [y] * p, inside, [("all-to-all", wires), ("all-gather", wires)]


def model_hierarchical_scatter(inner, outer, x_P, local, exponent):
    p = len(x_P)
    pieces = np.stack(np.split(x_P, p, axis=2), 1)  # [rank, owner, R, C / P]
    shape, n = pieces[0, 0].shape, pieces[0, 0].size
    ys = []
    for r in range(p):
        of_hosts = [
            inner.from_blocks(model_sum(inner, pieces[first : first + local, r], r % local, exponent), n)
            for first in range(0, p, local)
        ]
        ys.append(outer.from_blocks(model_sum(outer, of_hosts, r // local, exponent), n).reshape(shape))
    between = [("all-to-all", p // local * outer.wire_bytes(n))]
    return ys, [("all-to-all", p * inner.wire_bytes(n))], between


def model_hierarchical_gather(_, outer, x_P, local, exponent):
    y = np.concatenate([outer.round_trip(x, exponent) for x in x_P], axis=0)
    p, wire = len(x_P), outer.wire_bytes(x_P[0].size)
    return [y] * p, [("all-gather", p * wire)], [("all-gather", p // local * wire)]


def model_psum_scatter(ref, x_P, exponent):
    p = len(x_P)
    pieces = np.stack(np.split(x_P, p, axis=2), 1)  # [rank, owner, R, C / P]
    n = pieces[0, 0].size
    ys = [ref.from_blocks(model_sum(ref, pieces[:, r], r, exponent), n).reshape(pieces[0, 0].shape) for r in range(p)]
    return ys, [("all-to-all", p * ref.wire_bytes(n))]


def model_all_gather(ref, x_P, exponent):
    y = np.concatenate([ref.round_trip(x, exponent) for x in x_P], axis=0)
    return [y] * len(x_P), [("all-gather", len(x_P) * ref.wire_bytes(x_P[0].size))]


def model_all_to_all(ref, x_P, exponent):
    p = len(x_P)
    pieces = np.stack(np.split(x_P, p, axis=2), 1)
    read = [[pieces[s, r] if s == r else ref.round_trip(pieces[s, r], exponent) for s in range(p)] for r in range(p)]
    return [np.concatenate(row, axis=0) for row in read], [("all-to-all", p * ref.wire_bytes(pieces[0, 0].size))]


def model_ppermute(ref, x_P, exponent):
    p = len(x_P)
    zeros = np.zeros_like(x_P[0], dtype=np.float32)
    ys = [ref.round_trip(x_P[r - 1], exponent) if r else zeros for r in range(p)]
    return ys, [("collective-permute", ref.wire_bytes(x_P[0].size))]
