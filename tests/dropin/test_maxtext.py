"""MaxText from the package index, without a changed line: losses, gradients, bytes, and a checkpoint that goes on.

Needs Python 3.12 and `pip install '.[dropin-test]'`; `.ci/run` has an environment for it.
"""

import importlib.util
import json
import os
import shutil

import maxtext_program as program
import numpy as np
import pytest
from helpers import REPOSITORY, run_python
from hlo import collectives

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("maxtext") is None and "maxtext" not in os.environ.get("TACO_TEST_PROGRAMS", ""),
    reason="MaxText is not installed: pip install '.[dropin-test]'",
)
STEPS, SAVED = 20, 10


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """{mesh: (folder, losses)} of runs without the hook; that over tensor alone leaves checkpoints."""
    runs = {}

    def run(name):
        if name not in runs:
            folder = tmp_path_factory.mktemp("exact")
            saving = {"enable_checkpointing": True, "checkpoint_period": SAVED} if name == "tensor 4" else {}
            runs[name] = folder, program.run(folder, program.PLANS[name][0], STEPS, **saving)
        return runs[name]

    return run


def sent(text: str) -> dict[str, int]:
    """Bytes that collectives of more than 4 KiB put out on one device, by dtype."""
    totals: dict[str, int] = {}
    for _, dtype, elements in collectives(text):
        nbytes = elements * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)
        if nbytes > 4096:
            totals[dtype] = totals.get(dtype, 0) + nbytes
    return totals


@pytest.mark.parametrize("name", program.PLANS)
def test_it_learns_as_the_exact_program_does(name, exact, tmp_path):
    axes, plan = program.PLANS[name]
    folder, losses = exact(name)
    compressed = program.run(tmp_path, axes, STEPS, plan)
    assert len(losses) == len(compressed) == STEPS and losses[0] - losses[-1] > 0.02
    np.testing.assert_allclose(compressed, losses, rtol=0.005)
    assert max(abs(a - b) for a, b in zip(compressed, losses)) > 0
    before, after = sent(program.compiled_step(folder)), sent(program.compiled_step(tmp_path))
    assert "uint8" not in before
    if name == "tensor 4":
        assert after["uint8"] >= 0.95 * sum(after.values())
    assert sum(after.values()) < 0.6 * sum(before.values())
    assert "times fewer" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("name", program.PLANS)
def test_its_gradients(name, tmp_path):
    axes, plan = program.PLANS[name]
    arguments = program.settings(tmp_path, axes, STEPS)
    flags = "--xla_force_host_platform_device_count=4"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "DECOUPLE_GCLOUD": "TRUE"}
    command = [REPOSITORY / "tests" / "support" / "maxtext_program.py", " ".join(plan), *arguments]
    result = run_python(command, devices=None, cwd=tmp_path, env=environment)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert all(abs(slope - 1) < 0.02 for slope in found["slopes"]) and len(found["slopes"]) > 10
    assert 0 < max(found["errors"]) < 0.1
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=0.005)
    assert found["same"]


def test_its_own_checkpoint_goes_on(exact, tmp_path):
    """From the exact run's checkpoint, under the hook, as the exact run went on."""
    axes, plan = program.PLANS["tensor 4"]
    folder, losses = exact("tensor 4")
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    shutil.copytree(folder / "run" / "checkpoints" / str(SAVED), checkpoints / str(SAVED))
    saving = {"enable_checkpointing": True, "checkpoint_period": 100}
    rest = program.run(tmp_path, axes, STEPS, plan, **saving)
    assert len(rest) == STEPS - SAVED - 1
    np.testing.assert_allclose(rest, losses[SAVED + 1 :], rtol=0.005)
