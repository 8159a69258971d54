"""Layers that overlap messages with matrix products, by chains: parts of the local batch that go through each layer.

A layer is two sublayers, `x += sum over the ranks of last(core(norm(x)))`. The gradient of core's input is one message
(site `in_site`), the sum behind last another (`out_site`). What one chain sends depends on nothing that another
computes at that time, so it travels during the other's matrix products. Messages and products are smaller and more.
The same bytes travel, but for the padding of each message. With two chains, attention A and mlp M:

    product   A0    A1    M0    M1         |   A0 of the next layer
    message         A0    A1    M0    M1   |

A loop's body ends with M1. Its message is sent by the next layer's body, which is handed the term (`through_layers`):

    product   A0    A1    M0    M1   |   A0    A1    M0    M1
    message         A0    A1    M0   |   M1    A0    A1    M0

The first layer is handed zeros, and the last one's message overlaps with nothing.

Four functions make a layer:

    one_chain_layer     the whole batch; it carries the errors of error feedback, in both directions
    chained_layer       several chains in the forward pass; autodiff makes the backward pass of it
    overlapped_layer    several chains with every hop during a product of another chain, in both passes; each chain
                        carries the error of its forward sums
    prompt_layers       the same of several layers without a backward pass, for inference

`overlapped_layer` is differentiated by hand: only so does a message overlap with another chain's products in the
backward pass too. It takes whole sequences only. `<` is what `AsyncCollective.overlap_with` puts between a value and a
hop of the other chain's message:

    forward    h = norm(x)    u = core(h) <    y = last(u) <    send y;    x += sum
    backward   du = last'(dy) <    dh = core'(du) <    send dh;    dx += norm'(sum),  dy = dx

A message of one hop passes the second of both places only, and so overlaps with the whole sublayer.

Dims: B batch, L length, D model, F features between the products.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from taco_jax.collectives import comm_log
from taco_jax.collectives.async_collective import AsyncCollective, encoded_before
from taco_jax.collectives.vjp import OUTPUT_NAME, as_slot
from taco_jax.compat import barrier, varying_axes
from taco_jax.compression.site_scales import SiteScales, fork, merge_uses
from taco_jax.models.projections import (
    ResidualStream,
    State,
    add_bias,
    column_input,
    fed_column_input,
    kernels_joined_once,
    reduce_partials,
    reduce_partials_with_feedback,
    row_parallel,
    row_partial,
)
from taco_jax.models.run_config import Parallel, remat
from taco_jax.tensor_parallel import start_sum, start_sum_with_feedback, to_varying


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """Attention or mlp: norm(x, parameters), core(h, parameters, what all layers share).

    norm_name, name: keys of their parameters in a layer's. out_name: key of the last product's in those of `name`.
    post_norm_name: key of the normalisation of the sum, if it has one: x += norm(sum), `branch`.
    in_site, out_site: sites of the messages.
    """

    norm: Callable[[jax.Array, Any], jax.Array]
    core: Callable[[jax.Array, Any, Any], jax.Array]
    norm_name: str
    name: str
    out_name: str
    in_site: str
    out_site: str
    post_norm_name: str | None = None

    def branch(self, sum_BLD: jax.Array, params: Any) -> jax.Array:
        """Returns what a sum over the ranks adds to the residual stream. params: those of `branch_params`."""
        sum_BLD = add_bias(sum_BLD, params)
        return self.norm(sum_BLD, params["post_norm"]) if "post_norm" in params else sum_BLD

    def branch_params(self, params: Any) -> dict[str, Any]:
        """Returns the parameters of `branch`, out of a layer's."""
        out = params[self.name][self.out_name]
        bias = {"bias": out["bias"]} if "bias" in out else {}
        return bias | ({"post_norm": params[self.post_norm_name]} if self.post_norm_name else {})


def chain_count(batch: int, chains: int) -> int:
    """Returns the number of chains of a batch: the largest divisor of `batch` that is at most `chains`.

    The trainer's microbatches make exactly what is configured. One sequence, as in sampling, is one chain.
    """
    return next(n for n in range(min(batch, chains), 0, -1) if batch % n == 0)


def split_batch(x_BLD: jax.Array, n: int, dim: int = 0) -> tuple[jax.Array, ...]:
    return (x_BLD,) if n == 1 else tuple(jnp.split(x_BLD, n, dim))


def split_stream(stream: ResidualStream, n: int, dim: int = 0) -> tuple[ResidualStream, ...]:
    """Returns the stream of each chain, parts of the batch or of the sequence (dim 1); x and error alone."""
    xs, errors = split_batch(stream.x_BLD, n, dim), (None,) * n
    errors = errors if stream.error_BLD is None else split_batch(stream.error_BLD, n, dim)
    return tuple(ResidualStream(x, error) for x, error in zip(xs, errors))


def join_streams(streams: tuple[ResidualStream, ...], dim: int = 0) -> ResidualStream:
    xs, errors = tuple(s.x_BLD for s in streams), tuple(s.error_BLD for s in streams)
    fed = errors[0] is not None
    return ResidualStream(join_batch(xs, dim), join_batch(errors, dim) if fed else None)


def join_batch(xs: tuple[jax.Array, ...], dim: int = 0) -> jax.Array:
    return xs[0] if len(xs) == 1 else jnp.concatenate(xs, dim)


def one_chain_layer(sublayers: tuple[Sublayer, ...], par: Parallel) -> Callable:
    """Returns the layer of a whole batch: (stream, params, state, shared) -> the stream after it.

    The stream carries the errors of error feedback along.
    """

    def layer(stream: ResidualStream, params: Any, state: State, shared: Any) -> ResidualStream:
        x_BLD, error_BLD, carrier_BLD = stream
        for sublayer in sublayers:
            out = params[sublayer.name][sublayer.out_name]
            if carrier_BLD is not None and par.feeds_gradients_back(sublayer.in_site):
                own_BLD, carrier_BLD = fed_column_input(x_BLD, carrier_BLD, par, state, sublayer.in_site)
                h_BLD = sublayer.norm(own_BLD, params[sublayer.norm_name])
            else:
                h_BLD = column_input(sublayer.norm(x_BLD, params[sublayer.norm_name]), par, state, sublayer.in_site)
            u_BLF = sublayer.core(h_BLD, params[sublayer.name], shared)
            sum_BLD, error_BLD = row_parallel(u_BLF, out["kernel"], error_BLD, par, state=state, site=sublayer.out_site)
            x_BLD += sublayer.branch(sum_BLD, sublayer.branch_params(params))
        return ResidualStream(x_BLD, error_BLD, carrier_BLD)

    return layer


def chained_layer(sublayers: tuple[Sublayer, ...], par: Parallel) -> Callable:
    """Returns the layer of a tuple of chains: (xs, params, state, what each of them shares) -> the xs after it.

    Each chain is a use of its own of every site. XLA chooses what overlaps with a message. `overlapped_layer` leaves it
    less choice, but knows no sequence parallelism.
    """

    def layer(xs, params: Any, state: State, shared: Any):
        if len(xs) == 1:
            return (one_chain_layer(sublayers, par)(ResidualStream(xs[0]), params, state, shared[0]).x_BLD,)
        xs = list(xs)
        forked = {site: fork(scales, len(xs)) for site, scales in state.items()}
        states = [{site: uses[i] for site, uses in forked.items()} for i in range(len(xs))]
        sent = None  # (its chain, the sum) that no product has waited for
        for sublayer in sublayers:
            out = params[sublayer.name][sublayer.out_name]
            for i, state in enumerate(states):
                if sent and sent[0] == i:
                    xs[i] += sent[1]
                    sent = None
                h_BLD = column_input(sublayer.norm(xs[i], params[sublayer.norm_name]), par, state, sublayer.in_site)
                u_BLF = sublayer.core(h_BLD, params[sublayer.name], shared[i])
                y_BLD = row_partial(u_BLF, out["kernel"], par)
                if sent:
                    y_BLD, sum_BLD = _in_order(y_BLD, sent[1])
                    xs[sent[0]] += checkpoint_name(sum_BLD, OUTPUT_NAME)
                sum_BLD = reduce_partials(y_BLD, par, state, sublayer.out_site)
                sent = i, sublayer.branch(sum_BLD, sublayer.branch_params(params))
        if sent:
            xs[sent[0]] += sent[1]
        return tuple(xs)

    return layer


@jax.custom_vjp
def _in_order(y, arrived):
    """Returns (a chain's term, the sum of the chain before it); whatever uses one of them waits for both.

    So messages go one by one, each during the next chain's product. Without it XLA sends them in lockstep, during
    nothing, or makes one message of two. Both results must be used: XLA forgets the barrier otherwise.
    """
    return barrier(y, arrived)


_in_order.defvjp(lambda y, arrived: (_in_order(y, arrived), None), lambda _, cts: cts)


def overlapped_layer(sublayers: tuple[Sublayer, ...], par: Parallel) -> Callable:
    """Returns a layer with the values and gradients of `chained_layer(sublayers, par)` under `remat(..., par.remat)`:

        (streams, pending, params, state, shared) -> (streams, y)

    It takes and returns the `ResidualStream` of each chain, whose sums take along what the chain's sum before lost.
    pending: the `Pending` of the layer before, which the last stream then lacks, as the one returned lacks the sum of
    y_BLD; or None, and y is None.
    Call it where the layer's messages are counted (`comm_log.repeat`). It has first derivatives only.
    """
    calls = {direction: comm_log.current_calls(direction) for direction in ("forward", "backward")}

    @jax.custom_vjp
    def layer(streams, pending, params, state: State, shared):
        operands = {"params": params, "state": state, "shared": shared}
        return _forward(sublayers, par, calls["forward"], streams, pending=pending, **operands)[0]

    def forward(streams, pending, params, state, shared):
        operands = {"params": params, "state": state, "shared": shared}
        out, residuals, measures = _forward(sublayers, par, calls["forward"], streams, pending=pending, **operands)
        # Its term is not kept: a layer would keep one more activation.
        pending = None if pending is None else pending._replace(y_BLD=None)
        return out, (residuals, measures, pending, params, state, shared)

    def backward(saved, cts):
        residuals, measures, pending, params, state, shared = saved
        cts, ct_y_BLD = cts
        # To a gradient a compressed sum is exact, so that errors have none.
        cts = [ResidualStream(ct.x_BLD, jax.tree.map(jnp.zeros_like, ct.error_BLD)) for ct in cts]
        xs, of_pending, grads, more = _backward(
            sublayers, par, calls["backward"], residuals, params=params, state=state, shared=shared,
            cts=[ct.x_BLD for ct in cts], ct_y_BLD=ct_y_BLD, pending=pending,
        )  # fmt: skip
        if pending is not None:
            of_pending = Pending(*of_pending, _slot(pending.scales, measures.get(PENDING), None))
        slots = {site: _slot(scales, measures.get(site), more.get(site)) for site, scales in state.items()}
        return tuple(ct._replace(x_BLD=x) for ct, x in zip(cts, xs)), of_pending, grads, slots, None

    layer.defvjp(forward, backward)
    return layer


class _InFlight(NamedTuple):
    """A message that has started and the chain that waits for it; `receive` takes its sum."""

    chain: int
    site: str
    message: AsyncCollective
    receive: Callable[[Any], None]


PENDING = "the sum of the layer before"
"""In the place of a site's name, among measures."""


class Pending(NamedTuple):
    """The last sum of a layer's last chain, which travels during the first products of the next layer.

    y_BLD: this rank's term. branch: the parameters of `Sublayer.branch`. scales: of the site in its layer.
    """

    y_BLD: jax.Array
    branch: Any
    scales: SiteScales | None


class _Messages:
    """Sends the chains' messages, one at a time. measures: the largest block scales of those that have arrived."""

    def __init__(self, par: Parallel, state: State, direction: str, calls: int):
        self.measures: dict[str, list[Any]] = {}
        self._par, self._state, self._direction, self._calls = par, state, direction, calls
        self._in_flight: _InFlight | None = None

    def send(self, chain: int, site: str, y_BLD: jax.Array, receive: Callable[[jax.Array], None]) -> None:
        message = start_sum(
            y_BLD, self._par.axis, self._par.compression(site), self._state.get(site), self._direction, site=site,
            calls=self._calls,
        )  # fmt: skip
        self._in_flight = _InFlight(chain, site, message, receive)

    def send_fed(self, chain: int, site: str, y_BLD: jax.Array, error_BLD: jax.Array | None, receive,
                 pending: Pending | None = None) -> None:  # fmt: skip
        """Sends a forward sum that takes the chain's error along; receive: takes (sum, the error that it leaves).

        Of a `Pending` the scales are its own, and the measure stands under `PENDING`.
        """
        scales = self._state.get(site) if pending is None else pending.scales
        operands = self._par.compression(site), scales
        options = {"site": site, "calls": self._calls}
        if error_BLD is None:
            message = start_sum(y_BLD, self._par.axis, *operands, self._direction, **options)
            message = message.then(lambda sum_BLD: (sum_BLD, None))
        else:
            message = start_sum_with_feedback(y_BLD, self._par.axis, error_BLD, *operands, **options)
        self._in_flight = _InFlight(chain, site if pending is None else PENDING, message, receive)

    def overlap_with(self, value: Any, *, last: bool) -> Any:
        """Returns `value`, computed during a hop of the message in flight; the `last` one of a sublayer ends it."""
        if self._in_flight and (last or self._in_flight.message.hops > 1):
            value = self._in_flight.message.overlap_with(value)
            if last:
                self.done()
        return value

    def done(self, chain: int | None = None) -> None:
        """Ends the message in flight, during nothing; with a `chain`, only if it is that chain's."""
        if self._in_flight and chain in (None, self._in_flight.chain):
            y, measure = self._in_flight.message.done()
            self.measures.setdefault(self._in_flight.site, []).append(measure)
            self._in_flight.receive(y)
            self._in_flight = None


class _Saved(NamedTuple):
    """Residuals of one sublayer and chain: its input, or the vjps of its parts.

    last_vjp: None where core_vjp does both products.
    """

    x: Any = None
    norm_vjp: Any = None
    core_vjp: Any = None
    last_vjp: Any = None


class _Residuals(NamedTuple):
    """Values of the forward pass that `_backward` needs.

    of_sublayers: (`_Saved`, sum) of each sublayer and chain; sums where post norms need them. pending_sum: likewise
    that of a `Pending`.
    """

    of_sublayers: list
    pending_sum: jax.Array | None


def _forward(sublayers, par: Parallel, calls: int, streams, params, state: State, shared, pending: Pending | None):
    """Returns ((streams, y_BLD that is to be sent), residuals, measures)."""
    streams, messages, residuals, sums = list(streams), _Messages(par, state, "forward", calls), [], []
    last, of_pending, y_BLD = len(streams) - 1, [], None
    if pending is not None:
        _send_pending(messages, streams, sublayers[-1], pending, of_pending)
    # With all of a layer computed again, nothing here is differentiated, and chains can share what they cast.
    again = par.remat == "full"
    # The products of a chain's attention are shorter than a message. The mlp's kernels are cast in the rest of it, of
    # the pending one's if there is one, beside which nothing else can be.
    waits = last if pending is None else 0
    with kernels_joined_once() if again else contextlib.nullcontext():
        for k, sublayer in enumerate(sublayers):
            for i in range(len(streams)):
                messages.done(i)
                saved, y_BLD = _run_sublayer(sublayer, par, messages, streams[i].x_BLD, params=params, shared=shared[i])
                residuals.append(saved)
                if again and i == waits and sublayer is not sublayers[-1]:
                    following = sublayers[k + 1].name
                    kernels = _cast_kernels(params[following], par)
                    y_BLD, kernels = messages.overlap_with((y_BLD, kernels), last=True)
                    params = params | {following: kernels}
                else:
                    y_BLD = messages.overlap_with(y_BLD, last=True)
                if pending is not None and i == last and sublayer is sublayers[-1]:
                    sums.append(None)
                    break
                receive = _receiver(streams, i, sublayer, sublayer.branch_params(params), sums)
                with _first_in_layer(streams, i, k):
                    messages.send_fed(i, sublayer.out_site, y_BLD, streams[i].error_BLD, receive)
    messages.done()
    residuals = _Residuals(list(zip(residuals, sums)), of_pending[0] if of_pending else None)
    return (tuple(streams), None if pending is None else y_BLD), residuals, messages.measures


def _send_pending(messages: _Messages, streams: list[ResidualStream], sublayer: Sublayer, pending: Pending,
                  sums: list) -> None:  # fmt: skip
    """Starts the last chain's sum of the layer before, ahead of the first chain's products. sums: as of `_receiver`."""
    receive = _receiver(streams, len(streams) - 1, sublayer, pending.branch, sums)
    with encoded_before(streams[0].x_BLD) as follower:
        messages.send_fed(
            len(streams) - 1, sublayer.out_site, pending.y_BLD, streams[-1].error_BLD, receive, pending=pending
        )
    streams[0] = streams[0]._replace(x_BLD=follower.value)


def add_pending(sublayer: Sublayer, par: Parallel, streams, pending: Pending) -> tuple[ResidualStream, ...]:
    """Returns the streams with the sum that the last one lacks, which is sent beside nothing. It has a derivative."""
    *others, (x_BLD, error_BLD, _) = streams
    operands = par, {sublayer.out_site: pending.scales}, sublayer.out_site
    if error_BLD is None:
        sum_BLD = reduce_partials(pending.y_BLD, *operands)
    else:
        sum_BLD, error_BLD = reduce_partials_with_feedback(pending.y_BLD, error_BLD, *operands)
    return *others, ResidualStream(x_BLD + sublayer.branch(sum_BLD, pending.branch), error_BLD)


def no_term(stream: ResidualStream, par: Parallel) -> jax.Array:
    """Returns the term that is handed to a first layer: zeros of the stream's shape."""
    x_BLD = stream.x_BLD
    return to_varying(jnp.zeros(x_BLD.shape, par.dtype), varying_axes(x_BLD) | {par.axis})


@contextlib.contextmanager
def _first_in_layer(streams: list[ResidualStream], i: int, sublayer: int) -> Iterator[None]:
    """Makes the next chain wait until this one's message, which the block starts, is encoded.

    In a layer's first sublayer nothing else says which chain comes first. XLA would begin with the products of all.
    """
    if sublayer or i + 1 == len(streams):
        yield
        return
    with encoded_before(streams[i + 1].x_BLD) as follower:
        yield
    streams[i + 1] = streams[i + 1]._replace(x_BLD=follower.value)


def _cast_kernels(params: Any, par: Parallel) -> Any:
    """Returns a sublayer's parameters, its kernels in par.dtype; biases and norms take part in float32."""
    cast = lambda kernel: jax.tree.map(lambda a: a.astype(par.dtype), kernel)
    return {
        name: dense | {"kernel": cast(dense["kernel"])} if "kernel" in dense else dense
        for name, dense in params.items()
    }


def _receiver(streams: list[ResidualStream], i: int, sublayer: Sublayer, branch, sums: list) -> Callable:
    """Returns what adds (sum, error) to chain i's stream; `sums` gets the sum where its post norm needs it.

    branch: as of `Sublayer.branch_params`.
    """

    def receive(arrived):
        sum_BLD, error_BLD = arrived
        x_BLD = streams[i].x_BLD + sublayer.branch(sum_BLD, branch)
        streams[i] = ResidualStream(x_BLD, error_BLD)
        sums.append(sum_BLD if sublayer.post_norm_name else None)

    return receive


class ChainedLayer(NamedTuple):
    """One layer of prompts in chains. sublayers, shared: of each chain, the latter what its layers share."""

    sublayers: Sequence[tuple[Sublayer, ...]]
    params: Any
    shared: Sequence[Any]


def through_overlapped_layers(sublayers: tuple[Sublayer, ...], par: Parallel, streams, stacked, state: State,
                              shared_of: Callable, windows) -> tuple[ResidualStream, ...]:  # fmt: skip
    """Returns the streams of chains behind a loop over layers, each of which sends the last sum of the one before.

    stacked, state: parameters and site scales with a leading dim of layers. shared_of: gives what a layer's chains
    share, of its element of `windows`. Call it where the layers' messages are counted, as `overlapped_layer`.
    """
    last = sublayers[-1]
    own, handed_on = fork(state.get(last.out_site), 2)
    # The first layer is handed a term of zeros, with zeros as its branch's parameters and scales. The site table does
    # not count its message.
    behind = jax.tree.map(
        lambda a: jnp.concatenate([jnp.zeros_like(a[:1]), a]), (last.branch_params(stacked), handed_on)
    )
    before, after = (jax.tree.map(lambda a, part=part: a[part], behind) for part in (slice(None, -1), -1))
    layer = overlapped_layer(sublayers, par)

    def one(carried, of):
        streams, y_BLD = carried
        params, state, window, pending = of
        return layer(streams, Pending(y_BLD, *pending), params, state, shared_of(window)), None

    state = {**state, last.out_site: own}
    carried = tuple(streams), no_term(streams[-1], par)
    (streams, y_BLD), _ = lax.scan(one, carried, (stacked, state, windows, before))
    return add_pending(last, par, streams, Pending(y_BLD, *after))


def prompt_layers(par: Parallel, state: State) -> Callable:
    """Returns layers in chains that nothing differentiates: (streams, `ChainedLayer`s, pending) -> (streams, y_BLD).

    Chain i computes before chain i + 1 in each sublayer. pending, y_BLD: as of `overlapped_layer`.
    Call it where a layer's messages are counted, as `overlapped_layer`.
    """
    calls = comm_log.current_calls("forward")

    def run(streams, layers: Sequence[ChainedLayer], pending: Pending) -> tuple[tuple[ResidualStream, ...], jax.Array]:
        streams, messages = list(streams), _Messages(par, state, "forward", calls)
        _send_pending(messages, streams, layers[0].sublayers[-1][-1], pending, [])
        steps = [
            (of_layer, i, sublayer)
            for of_layer in layers
            for of_sublayer in zip(*of_layer.sublayers)
            for i, sublayer in enumerate(of_sublayer)
        ]
        with kernels_joined_once():
            for k, ((_, params, shared), i, sublayer) in enumerate(steps):
                messages.done(i)
                h_BLD = _norm(sublayer, par)(streams[i].x_BLD, params[sublayer.norm_name])
                u_BLF = sublayer.core(to_varying(h_BLD, par.axis), params[sublayer.name], shared[i])
                kernel = params[sublayer.name][sublayer.out_name]["kernel"]
                y_BLD = row_partial(messages.overlap_with(u_BLF, last=False), kernel, par)
                y_BLD = messages.overlap_with(y_BLD, last=True)
                if k + 1 == len(steps):
                    return tuple(streams), y_BLD
                receive = _receiver(streams, i, sublayer, sublayer.branch_params(params), [])
                messages.send_fed(i, sublayer.out_site, y_BLD, streams[i].error_BLD, receive)

    return run


def _backward(sublayers, par: Parallel, calls: int, residuals: _Residuals, params, state: State, shared, cts, ct_y_BLD,
              pending: Pending | None):  # fmt: skip
    """Returns (the streams' cotangents, those of the pending term and its branch's parameters, gradients, measures).

    ct_y_BLD: of the term that was handed on, None where none was; then nothing is pending, and the second is None.
    """
    cts, messages, grads = list(cts), _Messages(par, state, "backward", calls), {}
    of_sublayers = list(residuals.of_sublayers)

    def receiver(i, norm_vjp, name):
        def receive(sum_BLD):
            dx_BLD, dnorm = norm_vjp(sum_BLD)
            cts[i] += dx_BLD
            _add(grads, name, dnorm)

        return receive

    def into_branch(sublayer, i, sum_BLD, branch):
        """Returns (the cotangent of this rank's term of a sum that chain i has added, those of its branch)."""
        sum_BLD = jnp.zeros_like(cts[i]) if sum_BLD is None else sum_BLD
        ct_BLD, dbranch = jax.vjp(sublayer.branch, sum_BLD, branch)[1](cts[i])
        return to_varying(ct_BLD, par.axis), dbranch

    for sublayer in reversed(sublayers):
        for i in reversed(range(len(cts))):
            messages.done(i)
            saved, sum_BLD = of_sublayers.pop()
            if saved.x is not None:
                saved = _linearise(sublayer, par, saved.x, params, shared[i])[0]
            branch = sublayer.branch_params(params)
            if ct_y_BLD is not None:
                # What the sum went through is the next layer's part.
                ct_BLD, dbranch, ct_y_BLD = ct_y_BLD, jax.tree.map(jnp.zeros_like, branch), None
            else:
                ct_BLD, dbranch = into_branch(sublayer, i, sum_BLD, branch)
            if "post_norm" in dbranch:
                _add(grads, sublayer.post_norm_name, dbranch.pop("post_norm"))
            if saved.last_vjp is None:
                dh_BLD, dcore, dkernel = saved.core_vjp(ct_BLD)
            else:
                du_BLF, dkernel = saved.last_vjp(ct_BLD)
                dh_BLD, dcore = saved.core_vjp(messages.overlap_with(du_BLF, last=False))
            dh_BLD = messages.overlap_with(dh_BLD, last=True)
            _add(grads, sublayer.name, dcore | {sublayer.out_name: {"kernel": dkernel, **dbranch}})
            messages.send(i, sublayer.in_site, dh_BLD, receiver(i, saved.norm_vjp, sublayer.norm_name))
    messages.done()
    of_pending = None
    if pending is not None:
        of_pending = into_branch(sublayers[-1], len(cts) - 1, residuals.pending_sum, pending.branch)
    return tuple(cts), of_pending, grads, messages.measures


def _run_sublayer(sublayer: Sublayer, par: Parallel, messages: _Messages, x_BLD, params,
                  shared) -> tuple[_Saved, jax.Array]:  # fmt: skip
    """Returns (residuals, this rank's term) of one sublayer and chain."""
    kernel = params[sublayer.name][sublayer.out_name]["kernel"]
    if par.remat == "dots":
        # The features are computed again, which joins both products in one function.
        h_BLD, norm_vjp = jax.vjp(remat(_norm(sublayer, par), "full"), x_BLD, params[sublayer.norm_name])
        both = remat(lambda h, p, kernel: row_partial(sublayer.core(h, p, shared), kernel, par), "dots")
        y_BLD, core_vjp = jax.vjp(both, to_varying(h_BLD, par.axis), _core_params(sublayer, params), kernel)
        return _Saved(None, norm_vjp, core_vjp), y_BLD
    if par.remat == "full":
        h_BLD = _norm(sublayer, par)(x_BLD, params[sublayer.norm_name])
        saved = _Saved(x_BLD)
        u_BLF = sublayer.core(to_varying(h_BLD, par.axis), params[sublayer.name], shared)
    else:
        saved, u_BLF = _linearise(sublayer, par, x_BLD, params, shared)
    return saved, row_partial(messages.overlap_with(u_BLF, last=False), kernel, par)


def _linearise(sublayer: Sublayer, par: Parallel, x_BLD, params, shared) -> tuple[_Saved, jax.Array]:
    """Returns (the vjps, the features before the last product)."""
    kernel = params[sublayer.name][sublayer.out_name]["kernel"]
    h_BLD, norm_vjp = jax.vjp(_norm(sublayer, par), x_BLD, params[sublayer.norm_name])
    core = lambda h, p: sublayer.core(h, p, shared)
    u_BLF, core_vjp = jax.vjp(core, to_varying(h_BLD, par.axis), _core_params(sublayer, params))
    last_vjp = jax.vjp(functools.partial(row_partial, par=par), u_BLF, kernel)[1]
    return _Saved(None, norm_vjp, core_vjp, last_vjp), u_BLF


def _norm(sublayer: Sublayer, par: Parallel) -> Callable:
    return lambda x_BLD, params: sublayer.norm(x_BLD, params).astype(par.dtype)


def _core_params(sublayer: Sublayer, params):
    return {name: value for name, value in params[sublayer.name].items() if name != sublayer.out_name}


def _add(grads: dict, name: str, more) -> None:
    grads[name] = jax.tree.map(jnp.add, grads[name], more) if name in grads else more


def _slot(scales: SiteScales | None, forward: list | None, backward: list | None):
    """Returns the cotangent of a site's scales: the chains' measures, merged, in the row of their direction."""
    if scales is None or scales.slot is None:
        return None if scales is None else SiteScales(None, None)
    rows = []
    for row_K, measures in zip(scales.slot, (forward, backward)):
        measures = [m for m in measures or () if m is not None]
        rows.append(as_slot(merge_uses(jnp.stack(measures)), row_K) if measures else jnp.zeros_like(row_K))
    return SiteScales(None, jnp.stack(rows))
