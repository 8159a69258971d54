"""Mosaic's kernels for Blackwell: those that rotate need Hopper's matrix instruction, the others compile."""

import importlib

import pytest
from helpers import REPOSITORY


@pytest.fixture(scope="module")
def targets():
    """experiments/kernel_targets.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "experiments")
        return importlib.import_module("kernel_targets")


@pytest.mark.parametrize("operation", ["encode", "reduce_encode", "decode"])
def test_blackwell_compiles_what_does_not_rotate(operation, targets):
    row = targets.mosaic_row("mxfp4", operation, "bfloat16", 100)
    assert row["spilled"] == 0 and 0 < row["shared"] <= 1024 * targets.TARGETS[100].shared_of_block, row


def test_blackwell_lacks_the_matrix_instruction(targets):
    assert "wgmma" in targets.mosaic_row("taco", "decode", "bfloat16", 100)["reason"]
    assert "wgmma" in targets.nvlink_row("taco", 100)["reason"]
    assert targets.mosaic_row("taco", "decode", "bfloat16", 90)["spilled"] == 0
