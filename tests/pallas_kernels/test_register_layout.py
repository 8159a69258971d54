"""The order of rotated columns in registers: a permutation, run by run, that gives every thread consecutive bytes."""

import numpy as np
import pytest

from pallas_kernels import Format
from pallas_kernels.mosaic import rotation
from pallas_kernels.mosaic.registers import layout
from taco_jax.codec.hadamard import rotate

RUNS = [(128, 128), (256, 128), (128, 64), (128, 32), (128, 16), (64, 8), (32, 32)]


@pytest.mark.parametrize("width,run", RUNS)
def test_a_thread_has_a_quarter_of_each_run(width, run):
    columns = layout.columns(width, run)
    assert sorted(columns) == list(range(width))
    for start in range(0, width, run):
        held = [[], [], [], []]
        for position in range(start, start + run):
            # A product gives thread q of a row positions 2 q and 2 q + 1 of every eight.
            held[position % 8 // 2].append(int(columns[position]))
        for q, own in enumerate(held):
            assert own == list(range(start + q * run // 4, start + (q + 1) * run // 4))


@pytest.mark.parametrize("width,run", RUNS)
def test_columns_by_arithmetic(width, run):
    positions = np.arange(width, dtype=np.uint32)
    np.testing.assert_array_equal(layout.column_of(positions, run), layout.columns(width, run))


@pytest.mark.parametrize("kind", ["hadamard", "signed_hadamard"])
@pytest.mark.parametrize("element", ["int8", "int6", "int5", "int4"])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_matrices_rotate_into_that_order_and_back(element, block, kind):
    fmt = Format(element, block, kind, "bfloat16")
    matrices, table = rotation.matrices(fmt)
    full = np.block([[matrices[k] for k in row] for row in table])
    x = np.random.default_rng(0).standard_normal((5, block)).astype(np.float32)
    z = x @ full / np.sqrt(np.float32(block))
    columns = layout.columns(block, layout.run_columns(fmt))
    np.testing.assert_allclose(z, np.asarray(rotate(x, kind))[:, columns], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(z @ full.T / np.sqrt(np.float32(block)), x, rtol=1e-5, atol=1e-5)
