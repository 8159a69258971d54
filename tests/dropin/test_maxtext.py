"""MaxText from the package index, without a changed line: losses, gradients, bytes, and a checkpoint that goes on.

Needs Python 3.12 and `pip install '.[dropin-test]'`; `.ci/run` has an environment for it.
"""

import json
import shutil

import maxtext_program as program
import numpy as np
import pytest
import trainers
from helpers import REPOSITORY, run_python

pytestmark = trainers.wanted("maxtext", "maxtext", "pip install '.[dropin-test]'")
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


@pytest.mark.parametrize("name", program.PLANS)
def test_it_learns_as_the_exact_program_does(name, exact, tmp_path):
    axes, plan = program.PLANS[name]
    folder, losses = exact(name)
    compressed = program.run(tmp_path, axes, STEPS, plan)
    trainers.check_losses(losses, compressed, STEPS)
    before, after = (trainers.sent(program.TRAINER.compiled_step(path)) for path in (folder, tmp_path))
    assert "uint8" not in before
    if name == "tensor 4":
        assert after["uint8"] >= 0.95 * sum(after.values())
    assert sum(after.values()) < 0.6 * sum(before.values())
    assert "times fewer" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("name", program.PLANS)
def test_its_gradients(name, tmp_path):
    axes, plan = program.PLANS[name]
    arguments = program.settings(tmp_path, axes, STEPS)
    script = REPOSITORY / "tests" / "support" / "maxtext_program.py"
    trainers.check_gradients(program.TRAINER.found(tmp_path, [script, " ".join(plan), *arguments]))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_measured_run_is_exact_and_its_plan_is_taken(exact, tmp_path):
    """Losses of the measured run are the exact one's, digit by digit; the plan's are within what a codec may do."""
    name = "fsdp 2 x tensor 2"
    axes, (_, losses) = program.PLANS[name][0], exact(name)
    plan = tmp_path / "plan.json"
    measured = ["-m", "taco_jax.run", "--min-bytes", "0", "--calibrate", plan, "--bits", "6", "--"]
    arguments = ["-m", program.MODULE, *program.settings(tmp_path, axes, STEPS)]
    run_python([*measured, *arguments], devices=None, env=program.TRAINER.environment(), cwd=tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["learning/loss"] for line in lines] == losses
    folder = tmp_path / "compressed"
    compressed = program.run(folder, axes, STEPS, [str(plan)])
    trainers.check_losses(losses, compressed, STEPS)
    assert "match no collective" not in (folder / "report.txt").read_text()


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
