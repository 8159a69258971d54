"""Collectives whose hops a caller can start one by one, each beside work of its own.

A collective of this kind is a generator: it yields the arrays that a hop brings, takes them back, and returns (result,
measure). Between the two the caller may order them against its own values.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from taco_jax.compat import barrier

Hopping = Generator[list[jax.Array], list[jax.Array], tuple[jax.Array, Any]]


class AsyncCollective:
    """A collective whose first hop has been started; `hops` are left, the one under way too."""

    def __init__(self, collective: Hopping, hops: int):
        self.hops, self._collective = hops, collective
        self._result, self._arrays = None, next(collective)
        self._of_result: Callable[[Any], Any] = lambda y: y

    def then(self, function: Callable[[Any], Any]) -> AsyncCollective:
        """Makes `function` of the result the result. Call it before any hop has ended. Returns the collective."""
        self._of_result = function
        return self

    def overlap_with(self, value: Any) -> Any:
        """Returns `value`, computed while the hop under way travels; then the next one starts, or the result is made.

        Whoever uses the value, an array or a tree of them, waits for the hop, and the next hop for the value. Without
        this XLA puts what it likes between them, and often nothing beside one of them. jax 0.10 cannot say it of values
        that vary over different axes. A collective that has arrived leaves the value as it is.
        """
        if not self.hops:
            return value
        leaves, tree = jax.tree.flatten(value)
        together = barrier(*leaves, *self._arrays)
        self._next(list(together[len(leaves) :]))
        return jax.tree.unflatten(tree, together[: len(leaves)])

    def done(self) -> tuple[jax.Array, Any]:
        """Finishes it, with nothing beside; returns (result, measure)."""
        while self._result is None:
            self._next(self._arrays)
        return self._result

    def _next(self, arrays: list[jax.Array]) -> None:
        try:
            self._arrays = self._collective.send(arrays)
            self.hops -= 1
        except StopIteration as stop:
            y, measure = stop.value
            self._result, self.hops = (self._of_result(y), measure), 0


class Follower:
    """value: what waits until the message that is started in a block of `encoded_before` is encoded."""

    def __init__(self, value: jax.Array):
        self.value = value


_follower: contextvars.ContextVar[Follower | None] = contextvars.ContextVar("taco_jax_follower", default=None)


@contextlib.contextmanager
def encoded_before(value: jax.Array) -> Iterator[Follower]:
    """Yields a `Follower`, whose value waits for the encoding of the first message that the block starts, not for its
    hop. Without it XLA may compute with the value first, and the message leaves later. Other messages leave it as it
    is: exact ones, and those in one kernel.
    """
    follower = Follower(value)
    token = _follower.set(follower)
    try:
        yield follower
    finally:
        _follower.reset(token)


def before_follower(wires: jax.Array) -> jax.Array:
    """Returns `wires`, for which the value of the block of `encoded_before` now waits; once for each block."""
    follower = _follower.get()
    if follower is None:
        return wires
    _follower.set(None)
    follower.value, wires = barrier(follower.value, wires)
    return wires


@jax.custom_jvp
def without_derivative(x: jax.Array) -> jax.Array:
    """x, and an error for whoever differentiates what becomes of it: past a codec's bits every derivative is zero."""
    return x


@without_derivative.defjvp
def _refuse(primals, tangents):
    raise NotImplementedError(
        "start_psum: a compressed message under way has no derivative, and a layer of several chains no second one; "
        "psum and chains=1 have"
    )
