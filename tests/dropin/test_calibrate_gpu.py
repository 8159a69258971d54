"""Numbers that leave programs on GPUs, and what is measured there. `TACO_TEST_GPU=1 python -m pytest -m gpu`."""

import dropin_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import taco_jax
from taco_jax.dropin import host_calls

pytestmark = pytest.mark.gpu


def test_every_call_of_a_loop_brings_its_words():
    """Calls are launched long before there are values."""

    def step(x, n):
        x = jnp.tanh(x @ x)
        return x, host_calls.call(jnp.stack([n, x[0, 0].astype(jnp.uint32) + n]))

    f = jax.jit(lambda x: jax.lax.scan(step, x, jnp.arange(100, dtype=jnp.uint32))[0].sum())
    x = jnp.zeros((2048, 2048))
    found, problems = [], len(host_calls.problems())
    end = host_calls.receive(found.append)
    try:
        for _ in range(3):
            f(x)
        host_calls.wait()
    finally:
        end()
    assert host_calls.problems()[problems:] == []
    np.testing.assert_array_equal(np.stack(found), np.repeat(np.tile(np.arange(100), 3)[:, None], 2, 1))


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_a_stack_is_measured_and_its_plan_is_taken(tmp_path):
    on = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    args = programs.weights(on, tokens=(None,))
    f = programs.step(on)
    exact = f(*args)
    with taco_jax.calibrated(tmp_path / "plan.json", bits=6.125, codecs=["int6h"], min_bytes=0) as calibration:
        measured = f(*args)
        f(*args)
    least, greatest, error = programs.difference(exact, measured)
    assert error < 1e-3, (least, greatest, error)  # 0 but where XLA, which fuses after the hook, rounds otherwise
    rows = calibration.rows()
    assert {(row.axis, row.direction) for row in rows} == {("tensor", "forward"), ("tensor", "backward")}
    assert all(row.calls == 2 * programs.LAYERS for row in rows), [row.calls for row in rows]
    assert all(25 < row.chosen.snr < 35 and 2.5 < row.kurtosis < 6 for row in rows), rows
    with taco_jax.compressed(tmp_path / "plan.json", min_bytes=0) as report:
        ours = f(*args)
    assert {site.codec for site in report.sites if site.named} == {"int6h"}
    programs.check_close(exact, ours, 0.1)
