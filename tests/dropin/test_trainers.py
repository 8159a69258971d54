"""Trainers from the package index, without a changed line: losses, gradients, bytes, and a checkpoint that goes on.

Each needs an environment of its own, which `.ci/dropin` makes. MaxText has a file of its own.
"""

import functools
import json
import shutil
from typing import NamedTuple

import numpy as np
import pytest
from helpers import REPOSITORY
from trainers import Trainer, check_gradients, check_losses, sent, wanted

SUPPORT = REPOSITORY / "tests" / "support"
STEPS, SAVED = 20, 10
TUNIX = Trainer([SUPPORT / "tunix_program.py"], "jit__train_step")
GEMMA = Trainer([SUPPORT / "gemma_program.py"], "jit_step", {"TF_CPP_MIN_LOG_LEVEL": "3"})


class Case(NamedTuple):
    """arguments: of the program, after `train` or `gradients`. plan: what goes compressed."""

    program: str
    package: str
    trainer: Trainer
    arguments: list[str]
    plan: list[str]


CASES = {
    "tunix, tp 4": Case("tunix", "tunix", TUNIX, ["1", "4"], ["tp=int8h"]),
    "tunix, fsdp 2 x tp 2": Case(
        "tunix", "tunix", TUNIX, ["2", "2"], ["tp=int8h", "tp/all_gather=int8h", "fsdp=int8h"]
    ),
    "gemma, fsdp 4": Case(
        "gemma", "gemma", GEMMA, ["decoder", "fsdp", "4"], ["devices=int8h", "devices/all_gather=int8h"]
    ),
    "gemma, data 2 x tensor 2": Case(
        "gemma", "gemma", GEMMA, ["decoder", "tensor", "2"], ["tensor=int8h", "data=int8h"]
    ),
    "t5gemma, tensor 4": Case("t5gemma", "gemma", GEMMA, ["encoder-decoder", "tensor", "4"], ["tensor=int8h"]),
}
cases = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=wanted(case.program, case.package, f".ci/dropin {case.program}"))
        for name, case in CASES.items()
    ],
)


def run(case: Case, folder, steps, every, plan=None):
    """Runs a program in `folder`, with a checkpoint every so many steps. Returns the loss of every step."""
    case.trainer.run(folder, ["train", *case.arguments, steps, every], plan)
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """exact(name): (folder, losses) of a run without the hook, which leaves checkpoints."""

    @functools.cache
    def run_once(name):
        folder = tmp_path_factory.mktemp("exact")
        return folder, run(CASES[name], folder, STEPS, SAVED)

    return run_once


@cases
def test_it_learns_as_the_exact_program_does(name, exact, tmp_path):
    case = CASES[name]
    folder, losses = exact(name)
    check_losses(losses, run(case, tmp_path, STEPS, 0, case.plan), STEPS)
    before, after = (sent(case.trainer.compiled_step(path)) for path in (folder, tmp_path))
    assert "uint8" not in before
    assert after["uint8"] >= 0.95 * sum(after.values())
    assert sum(after.values()) < 0.6 * sum(before.values())
    assert "times fewer" in (tmp_path / "report.txt").read_text()


@cases
def test_its_gradients(name, tmp_path):
    case = CASES[name]
    arguments = [*case.trainer.program, "gradients", *case.arguments, *case.plan]
    check_gradients(case.trainer.found(tmp_path, arguments))


@cases
def test_its_own_checkpoint_goes_on(name, exact, tmp_path):
    """From the exact run's checkpoint, under the hook, as the exact run went on."""
    case = CASES[name]
    folder, losses = exact(name)
    (saved,) = (folder / "checkpoints").glob(f"*{SAVED}")
    shutil.copytree(saved, tmp_path / "checkpoints" / saved.name)
    rest = run(case, tmp_path, STEPS, 100, case.plan)
    assert len(rest) == STEPS - SAVED
    np.testing.assert_allclose(rest, losses[SAVED:], rtol=0.005)
