"""Every kernel compiles for sm_90a and keeps its values in registers: ptxas reports no spills and no stack.

Exactly none for the presets in bfloat16, with up to four ranks, rounded to nearest; a few bytes for others.
"""

import dataclasses
import itertools

import pytest
from aot.topology import FITTED, compile_on_one, spills
from covers import cover
from mosaic_programs import (
    DTYPES,
    FIELDS,
    OPERATIONS,
    PRESETS,
    RESIDUAL,
    RESIDUAL_OF_SUM,
    WIDE,
    operation_program,
    why_unsupported,
)

from pallas_kernels import Format
from pallas_kernels.mosaic import pipeline
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format

ROUNDINGS = ("nearest", "stochastic")
# Enough tiles for four warpgroups a multiprocessor, in static order; so many that the scheduler hands them out; and
# few, for one.
LARGE = 256 * 64 * 132 * 4
SIZES = (LARGE, LARGE * pipeline.MIN_DYNAMIC_TILES_PER_WORKER, 256 * 64)
RANKS = (4, 2, 8)


# Bytes of a thread's local memory.
FEW_BYTES = 0 if FITTED else 32
SOME_BYTES = 160
# Codecs that are no preset: a block of 256 needs twice the registers.
MORE_BYTES = 2304
# What ptxas said of each program: one that was compiled before is not compiled again.
REPORTS = {}


def check(*program, capfd, most=0):
    if program not in REPORTS:
        run, shapes = operation_program(*program)
        capfd.readouterr()
        compile_on_one(run, *shapes)
        REPORTS[program] = capfd.readouterr().out
    reported = REPORTS[program]
    assert "for 'sm_90a'" in reported, reported
    found = spills(reported)
    assert found and all(max(kernel) <= most for kernel in found), reported


def check_preset(name, operation, dtype, rounding, n, ranks, capfd):
    fmt = to_format(dataclasses.replace(CODECS[name], rounding=rounding), encodes="encode" in operation)
    # Noise, 32-bit values and wires of many ranks take registers of their own, and so does float16, which is cut into
    # two bfloat16, where a product before and one after the sum want theirs.
    exact = fmt.rounding == "nearest" and dtype != "float32" and ranks < 8
    exact = exact and (operation, dtype) != ("reduce_decode", "float16")
    check(fmt, operation, dtype, n, ranks, capfd=capfd, most=FEW_BYTES if exact else SOME_BYTES)


def check_fields(element, block, rotation, scale, operation, dtype, n, ranks, capfd):
    fmt = Format(element, block, rotation, scale)
    if scale == "site" and fmt.nan is None:
        fmt = dataclasses.replace(fmt, scale="e8m0")
    if why_unsupported(fmt, operation, dtype, n, ranks) is None:
        check(fmt, operation, dtype, n, ranks, capfd=capfd, most=MORE_BYTES)


CASES = dict(name=PRESETS, operation=OPERATIONS, dtype=DTYPES, rounding=ROUNDINGS, size=SIZES, ranks=RANKS)


@pytest.mark.parametrize("case", cover(2, **CASES), ids=lambda case: "-".join(map(str, case)))
def test_presets(case, capfd):
    check_preset(*case, capfd)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", SIZES[:2])
def test_presets_in_the_form_that_models_use(name, operation, size, capfd):
    check_preset(name, operation, "bfloat16", "nearest", size, 4, capfd)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", SIZES[:2])
def test_residuals(name, size, capfd):
    check(to_format(CODECS[name]), RESIDUAL, "bfloat16", size, 1, capfd=capfd, most=FEW_BYTES)


@pytest.mark.parametrize("name", PRESETS)
def test_residuals_of_sums(name, capfd):
    check(to_format(CODECS[name]), RESIDUAL_OF_SUM, "bfloat16", LARGE, 4, capfd=capfd, most=SOME_BYTES)


@pytest.mark.parametrize("name", PRESETS)
def test_wide_sums(name, capfd):
    check(to_format(CODECS[name], encodes=False), WIDE, "bfloat16", LARGE, 4, capfd=capfd, most=SOME_BYTES)


@pytest.mark.parametrize("case", cover(2, **FIELDS, size=SIZES, ranks=RANKS), ids=lambda case: "-".join(map(str, case)))
def test_fields(case, capfd):
    check_fields(*case, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_preset(name, operation, capfd):
    for rest in itertools.product(DTYPES, ROUNDINGS, SIZES, RANKS):
        check_preset(name, operation, *rest, capfd)
