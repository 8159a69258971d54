"""Outliers in a run that trains, put in between its steps: what the guard is there for."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from unittest import mock

import jax

from taco_jax.train import loop


@contextlib.contextmanager
def outliers(at: Mapping[int, float], see: Callable[[loop.Run, int], None] = lambda run, step: None):
    """Within it one channel of what attention adds to the residual stream is multiplied, after each of the steps `at`,
    by the factor there. see(run, step): called after every step."""
    unchanged = loop.Run.finish

    def finish(run, step, *arguments, **options):
        unchanged(run, step, *arguments, **options)
        see(run, step)
        if step in at:
            params = jax.tree_util.tree_map_with_path(lambda path, w: _scaled(at[step], path, w), run.state.params)
            run.state = dataclasses.replace(run.state, params=params)

    with mock.patch.object(loop.Run, "finish", finish):
        yield


def _scaled(factor: float, path, w: jax.Array) -> jax.Array:
    if tuple(key.key for key in path)[-3:] != ("attn", "out", "kernel"):
        return w
    # Every process of several does this alike.
    return jax.jit(lambda w: w.at[..., 0].multiply(factor), out_shardings=w.sharding)(w)
