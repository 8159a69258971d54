"""Collectives of an axis that spans hosts, in levels: inside each host, between hosts, inside again.

With P = H x L ranks, L on each of H hosts, rank r is local rank r % L of host r // L (`topology.py`). Between hosts
each rank exchanges with the ranks of the same r % L only, and no more than 1/L of the message.

    psum          reduce-scatter inside -> all-reduce between -> all_gather inside
    psum_scatter  reduce-scatter inside -> reduce-scatter between
    all_gather    all_gather between -> all_gather inside

An all-reduce of a message of W bytes, in the codec of each level:

| between hosts | hops | bytes inside, of one rank | bytes between, of one rank |
|---|---|---|---|
| two-shot | 4, 3 encodings | 2 (L-1)/L W | 2 (H-1)/H W/L |
| exchange (two hosts) | 3 | 2 (L-1)/L W | W/L |

A flat two-shot sends 2 (H-1)/H W between hosts, L times as much. Sums are float32, over the ranks of a host in their
order, then over hosts in theirs; the owner's own term, of a host's sum too, is unquantised on the way to the sum (but
in an exchange). The last encoding is of the whole sum, and every rank, its owner too, decodes its bytes: after a
two-shot they go through both gathers as they are, after an exchange the ranks that hold the same share encode equal
sums. What a two-shot or an all_gather sends between hosts is therefore in that level's codec for everybody, also where
the ranks of one host gather from each other: only so all ranks are bit-identical.

An exponent is that of the codec inside; the other codec's is shifted by the quotient of their largest values, and the
measure holds the largest scale of all hops, in units of the codec inside.

Dim letters: P ranks, H hosts, L ranks of a host, S elements of x, N elements of a share (one rank's), W bytes of a
message.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from taco_jax.codec import Codec
from taco_jax.collectives.async_collective import AsyncCollective, Hopping
from taco_jax.collectives.manual_region import same_on_all_ranks, to_varying
from taco_jax.collectives.message import Message, exponent_of, in_units_of, merge
from taco_jax.collectives.transport import after, chunk_elements, cut, gather, send_chunks, swap
from taco_jax.compression import dispatch
from taco_jax.compression.dispatch import Geometry


def start(message: Message, x: jax.Array, exponent, key) -> AsyncCollective:
    """The sum of x over the axis, its first hop started: varying -> invarying, x's shape and dtype, with the measure of
    all hops."""
    hops = 3 if message.level("between").in_one_shot else 4
    return AsyncCollective(_all_reduce(message, x, exponent, key), hops)


def _all_reduce(message: Message, x: jax.Array, exponent, key) -> Hopping:
    levels = _Levels(message, exponent, key)
    inner, outer, local = levels.inner, levels.outer, message.local
    coarse = max(inner.codec, outer.codec, key=lambda codec: codec.block)
    # Share l * H + h is that of rank h * L + l, so that what the ranks of a host own lies side by side.
    n = chunk_elements(coarse, x.size, message.ranks)
    chunks = cut(Geometry(x.size, message.ranks, n), message.chunks, coarse.block)
    x_S = to_varying(x, message.axis).reshape(-1)

    send = lambda wires: swap(inner, wires.reshape(local, -1))
    arrived, measures, sent_inside = send_chunks(inner, chunks, x_S, exponent, key=levels.inner_key, send=send)
    arrived = yield arrived
    sums = [levels.sums_of_host(received, x_S, g) for g, received in zip(chunks, arrived)]
    run = _exchange if outer.in_one_shot else _two_shot
    wires, codec, more, sent_between = yield from run(levels, chunks, sums)
    measures += more

    gathered = []
    for wire in wires:
        # Every rank of the host has another share of the wires, and all hosts have the same.
        y, sent = gather(inner, after(gathered, wire.reshape(-1)), "varying")
        gathered.append(same_on_all_ranks(y.reshape(message.ranks, -1), message.axis))
        sent_inside += sent
    message.record("psum", x.size, x.dtype, sent_inside, sent_between)
    gathered = yield gathered
    exponent = levels.outer_exponent if codec == outer.codec else exponent
    y = dispatch.decode_chunks(codec, chunks, gathered, x.dtype, exponent, backend=message.backend)
    return y.reshape(x.shape), merge(measures)


def start_reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> AsyncCollective:
    """Row r of the summed [P, N] for rank r, x's dtype[N], and the measure of both hops, of which the first has been
    started; the own terms unquantised on both."""
    return AsyncCollective(_scatter(message, x_PN, exponent, key), 2)


def reduce_scatter(message: Message, x_PN: jax.Array, exponent, key) -> tuple[jax.Array, jax.Array]:
    """The result of `start_reduce_scatter`."""
    return start_reduce_scatter(message, x_PN, exponent, key).done()


def _scatter(message: Message, x_PN: jax.Array, exponent, key) -> Hopping:
    levels = _Levels(message, exponent, key)
    inner, outer, (p, n) = levels.inner, levels.outer, x_PN.shape
    x_S = to_varying(x_PN, message.axis).reshape(-1)
    block = max(inner.codec.block, outer.codec.block)
    chunks = cut(Geometry(p * n, p, n), message.chunks, block)

    def send(wires_PW):
        # Rank l of every host gets the rows of all ranks l.
        wires_LHW = wires_PW.reshape(outer.ranks, inner.ranks, -1).swapaxes(0, 1)
        return swap(inner, wires_LHW.reshape(inner.ranks, -1))

    arrived, measures, sent_inside = send_chunks(inner, chunks, x_S, exponent, key=levels.inner_key, send=send)
    arrived = yield arrived
    pieces, sent_between, gathered = [], [], []
    for k, (chunk, received) in enumerate(zip(chunks, arrived)):
        sums_HN = levels.sums_of_hosts_rows(received, x_S, chunk)
        whole = Geometry(sums_HN.size, *sums_HN.shape)
        wires, measure = levels.encode_outer(whole, sums_HN.reshape(-1), 0, k)
        arrived_HW, sent = swap(outer, after(gathered, wires))
        gathered.append(arrived_HW)
        measures.append(levels.in_own_units(measure))
        sent_between += sent
        pieces.append((whole, sums_HN.reshape(-1)))
    gathered = yield gathered
    pieces = [
        dispatch.reduce_decode(
            outer.codec, whole, received, sums, rank=outer.rank, exponent=levels.outer_exponent, backend=message.backend
        ).astype(x_PN.dtype)
        for (whole, sums), received in zip(pieces, gathered)
    ]  # fmt: skip
    message.record("psum_scatter", p * n, x_PN.dtype, sent_inside, sent_between)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces), merge(measures)


def all_gather(message: Message, x: jax.Array, exponent, key, to: str) -> tuple[jax.Array, jax.Array]:
    """[...] -> [P, ...], in one encoding, in the codec between hosts; the own shard is quantised too."""
    levels = _Levels(message, exponent, key)
    inner, outer, p, n = levels.inner, levels.outer, message.ranks, x.size
    x_S = to_varying(x, message.axis).reshape(-1)
    chunks = cut(Geometry(n, 1, n), message.chunks, outer.codec.block)
    send = lambda wires: gather(outer, wires[0], "varying")
    arrived, measures, sent_between = send_chunks(
        outer, chunks, x_S, levels.outer_exponent, key=levels.outer_key, send=send
    )
    gathered, sent_inside = [], []
    for wires_HW in arrived:
        wires_LHW, sent = gather(inner, after(gathered, wires_HW), "varying")
        wires_PW = wires_LHW.swapaxes(0, 1).reshape(p, -1)
        gathered.append(same_on_all_ranks(wires_PW, message.axis) if to == "invarying" else wires_PW)
        sent_inside += sent
    message.record("all_gather", p * n, x.dtype, sent_inside, sent_between)
    codec, whole = outer.codec, cut(Geometry(p * n, p, n), message.chunks, outer.codec.block)
    y_S = dispatch.decode_chunks(codec, whole, gathered, x.dtype, levels.outer_exponent, backend=message.backend)
    measures = [levels.in_own_units(measure) for measure in measures]
    return y_S.reshape(p, *x.shape), merge(measures)


def _two_shot(levels: _Levels, chunks, sums):
    """(the sum's wires [H, W] of this rank's chunks, their codec, measures, what was sent): the bytes of each owner."""
    outer, arrived, gathered, measures, sent = levels.outer, [], [], [], []
    for k, x_S in enumerate(sums):
        wires, measure = levels.encode_outer(levels.of_host(chunks[k]), x_S, 0, k)
        received, some = swap(outer, after(arrived, wires))
        arrived.append(received)
        measures.append(levels.in_own_units(measure))
        sent += some
    arrived = yield arrived
    for k, (received, x_S) in enumerate(zip(arrived, sums)):
        wire, measure = dispatch.reduce_encode(
            outer.codec, levels.of_host(chunks[k]), received, x_S, rank=outer.rank, exponent=levels.outer_exponent,
            key=outer.key(levels.outer_key, 1, k), with_stats=outer.with_stats, backend=outer.backend,
        )  # fmt: skip
        wires, some = gather(outer, after(gathered, wire), "varying")
        gathered.append(wires)
        measures.append(levels.in_own_units(measure))
        sent += some
    gathered = yield gathered
    return gathered, outer.codec, measures, sent


def _exchange(levels: _Levels, chunks, sums):
    """Does as `_two_shot` in one hop: all hosts add up the same wires and encode the same sums, in the codec inside."""
    outer, inner, gathered, measures, sent = levels.outer, levels.inner, [], [], []
    for k, x_S in enumerate(sums):
        wires, measure = levels.encode_outer(Geometry(x_S.size, 1, x_S.size), x_S, 0, k)
        received, some = gather(outer, after(gathered, wires[0]), "varying")
        gathered.append(received)
        measures.append(levels.in_own_units(measure))
        sent += some
    gathered = yield gathered
    out = []
    for k, (received, x_S) in enumerate(zip(gathered, sums)):
        total_S = dispatch.sum_decode(
            outer.codec, received, x_S.size, jnp.float32, levels.outer_exponent, backend=outer.backend
        )  # fmt: skip
        # The noise of a rank inside its host: that of the ranks which encode the same sums elsewhere.
        wires, measure = dispatch.encode(
            inner.codec, levels.of_host(chunks[k]), total_S, levels.exponent,
            inner.key(levels.inner_key, 1, k, inner.rank), with_stats=inner.with_stats, backend=inner.backend,
        )  # fmt: skip
        out.append(wires)
        measures.append(measure)
    return out, inner.codec, measures, sent


class _Levels:
    """The two levels of a message, with what belongs to each: exponent, key, units."""

    def __init__(self, message: Message, exponent, key):
        self.inner, self.outer = message.level("inside"), message.level("between")
        own: Codec = message.codec
        self.exponent, self.outer_exponent = exponent, exponent_of(own, self.outer.codec, exponent)
        self.in_own_units = lambda measure: in_units_of(own, self.outer.codec, measure)
        self.inner_key, self.outer_key = (None, None) if key is None else jax.random.split(key)

    def of_host(self, chunk: Geometry) -> Geometry:
        """A chunk of the shares of all ranks -> that of the ranks with this one's place in their hosts, by itself."""
        n = chunk.per_message
        return Geometry(self.outer.ranks * n, self.outer.ranks, n)

    def encode_outer(self, geometry: Geometry, x_S: jax.Array, hop: int, chunk: int):
        outer = self.outer
        return dispatch.encode(
            outer.codec, geometry, x_S, self.outer_exponent, outer.key(self.outer_key, hop, chunk),
            with_stats=outer.with_stats, backend=outer.backend,
        )  # fmt: skip

    def sums_of_host(self, received: jax.Array, x_S: jax.Array, chunk: Geometry) -> jax.Array:
        """float32[H N], the host's sums of the shares l H + h of x, of all h, from the wires [L, H W] of its ranks."""
        hosts, local, n = self.outer.ranks, self.inner.ranks, chunk.per_message
        wires_LHW = received.reshape(local, hosts, -1)
        rows = []
        for h in range(hosts):
            # Of every L-th part of x the same piece.
            share = Geometry(chunk.elements, local, n, h * chunk.distance + chunk.offset, hosts * chunk.distance)
            rows.append(self._sum(share, wires_LHW[:, h], x_S))
        return jnp.concatenate(rows)

    def sums_of_hosts_rows(self, received: jax.Array, x_S: jax.Array, chunk: Geometry) -> jax.Array:
        """float32[H, N], the host's sums of rows h L + l of x, of all h, from the wires [L, H W] of its ranks."""
        hosts, local, distance = self.outer.ranks, self.inner.ranks, chunk.distance
        wires_LHW = received.reshape(local, hosts, -1)
        rows = Geometry(local * distance, local, chunk.per_message, chunk.offset, distance)
        parts = jnp.split(x_S, hosts)
        return jnp.stack([self._sum(rows, wires_LHW[:, h], part) for h, part in enumerate(parts)])

    def _sum(self, geometry: Geometry, wires_LW: jax.Array, x_S: jax.Array) -> jax.Array:
        return dispatch.reduce_decode(
            self.inner.codec, geometry, wires_LW, x_S, rank=self.inner.rank, exponent=self.exponent, dtype=jnp.float32,
            backend=self.inner.backend,
        )  # fmt: skip
