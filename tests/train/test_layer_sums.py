"""Gradients that are summed over dp layer by layer, inside of the backward pass: values, bits, and what is listed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from data_parallel_programs import ADAM, CONFIG, batch
from model_helpers import assert_gradients_close, by_path, unpadded

from taco_jax.config import DataParallelConfig, MeshConfig
from taco_jax.mesh import make_mesh
from taco_jax.train.step import build

SLOW = pytest.mark.slow


def on(dp=1, tp=1, changes=None, **data_parallel):
    return dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(dp=dp, tp=tp, devices_per_host=data_parallel.pop("devices_per_host", None)),
        optimizer=ADAM,
        data_parallel=DataParallelConfig(**{"gradients": "none"} | data_parallel),
        **changes or {},
    )


@functools.cache
def _program(key, config):
    return build(config.value, make_mesh(config.value.mesh.dp, 1, config.value.mesh.tp))


@dataclasses.dataclass(frozen=True, eq=False)
class _Held:
    value: object


_configs: dict = {}


def program(config):
    held = _configs.setdefault(repr(config), _Held(config))
    return _program(repr(config), held)


@functools.cache
def _gradients(key):
    p = program(_configs[key].value)
    state = p.init(jax.random.key(0))
    f = jax.jit(lambda state, tokens: p._gradients(state, tokens, False)[:2])
    loss, grads = f(state, batch(p)["tokens"])
    if p.data_parallel.sharded:
        grads = jax.jit(p.data_parallel.whole)(grads)
    return float(loss), by_path(unpadded(grads, p.config.model))


def gradients(config):
    """(loss, gradients by path) of a new state's first batch."""
    program(config)
    return _gradients(repr(config))


CASES = [
    (2, 1, {}),
    (2, 2, {}),
    (2, 2, dict(zero1=True)),
]


@pytest.mark.parametrize("dp, tp, settings", CASES, ids=str)
def test_exact_sums_are_the_bits_of_today(dp, tp, settings):
    loss, grads = gradients(on(dp, tp, overlap=True, **settings))
    after_loss, after = gradients(on(dp, tp, **settings))
    alone_loss, alone = gradients(on())
    np.testing.assert_allclose(loss, alone_loss, rtol=1e-6)
    assert_gradients_close(grads, alone, exact=True)
    assert loss == after_loss
    for path in after:
        np.testing.assert_array_equal(grads[path], after[path], err_msg=str(path))
