"""What the NVLink kernels do not support: one clear line for each, without a GPU."""

import dataclasses
import itertools

import jax
import pytest
from mosaic_programs import DTYPES, PRESETS

from pallas_kernels import Format, compat, nvlink
from pallas_kernels.nvlink.support import RANKS
from taco_jax import CODECS
from taco_jax.compression.dispatch import to_format

TACO = to_format(CODECS["taco"])
GROUP = 8 * 128


@pytest.fixture(autouse=True)
def jax_0_11(monkeypatch):
    """What else there is to say of them is the same under jax 0.10, which has no kernels."""
    monkeypatch.setattr(compat, "WARPS_KNOW_THE_MESH", True)


def why_unsupported(fmt=TACO, operation="all_reduce", dtype="bfloat16", ranks=4, per_message=None):
    return nvlink.why_unsupported(fmt, operation, dtype, ranks, per_message=per_message)


@pytest.mark.parametrize(
    "asked,reason",
    [
        ({"ranks": 3}, "nvlink kernels are for 2, 4, 8 ranks, not 3"),
        ({"ranks": 1}, "nvlink kernels are for 2, 4, 8 ranks, not 1"),
        ({"ranks": 16}, "nvlink kernels are for 2, 4, 8 ranks, not 16"),
        ({"fmt": dataclasses.replace(TACO, scale="site")}, "nvlink kernels have no scale 'site'"),
        ({"fmt": dataclasses.replace(TACO, rounding="stochastic")}, "nvlink kernels round to nearest"),
        ({"dtype": "int8"}, "mosaic kernels take bfloat16, float16, float32, not int8"),
        ({"dtype": "float64"}, "mosaic kernels take bfloat16, float16, float32, not float64"),
        ({"fmt": dataclasses.replace(TACO, block=16)}, "mosaic kernels have blocks of 32, 64, 128, 256, not 16"),
        ({"fmt": dataclasses.replace(TACO, block=512)}, "mosaic kernels have blocks of 32, 64, 128, 256, not 512"),
        (
            {"fmt": Format("int5", 32, "none", "e8m0")},
            "mosaic packs parts of 8 elements and more, and a block of 32 in 5 bits has smaller",
        ),
        ({"operation": "all_to_all"}, "there is no NVLink kernel for all_to_all, only for all_gather, all_reduce, "),
    ],
)
def test_what_has_no_kernel(asked, reason):
    found = why_unsupported(**asked)
    assert found.startswith(reason) and "\n" not in found


def test_an_old_jax(monkeypatch):
    monkeypatch.setattr(compat, "WARPS_KNOW_THE_MESH", False)
    assert why_unsupported() == f"NVLink kernels need jax 0.11 or newer, and this is {jax.__version__}"


@pytest.mark.parametrize("operation", nvlink.OPERATIONS)
@pytest.mark.parametrize("block", [32, 128, 256])
def test_messages_are_tiles_or_more_in_whole_groups_of_rows(operation, block):
    fmt = dataclasses.replace(TACO, block=block, rotation="none")
    group = 8 * max(128, block)
    for n in (8 * group, 9 * group, 8 * group * 1000 + 3 * group):
        assert why_unsupported(fmt, operation, per_message=n) is None
    for n in (1, group, 7 * group, 8 * group + 1, 9 * group - 8, 8 * group * 1000 + group // 2):
        line = f"a message of {n} elements is not whole groups of 8 rows of {group // 8}, or under {8 * group}"
        assert why_unsupported(fmt, operation, per_message=n) == line


# (codec, dtype, ranks, operation) whose kernels have too little shared memory: of the presets none.
UNFIT = set()


def test_every_preset_fits():
    cases = itertools.product(PRESETS, DTYPES, RANKS, nvlink.OPERATIONS)
    found = {case: why_unsupported(to_format(CODECS[case[0]]), case[3], case[1], case[2]) for case in cases}
    assert len(found) == 12 * 3 * 3 * 3
    assert {case for case, reason in found.items() if reason} == UNFIT, {c: r for c, r in found.items() if r}


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_too_little_shared_memory(operation):
    # Of blocks of 256, frames, tiles and matrices are twice as large and more; only sums keep frames of all ranks.
    fmt = Format("int8", 256, "hadamard", "bfloat16")
    line = f"{operation} of blocks of 256 of bfloat16 over 8 ranks needs too much shared memory"
    assert why_unsupported(fmt, operation, ranks=8) == line
    assert why_unsupported(fmt, "all_gather", ranks=8) is None
