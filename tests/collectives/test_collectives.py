"""Compressed collectives: values against a numpy model, bytes against compiled HLO, equal bits on all ranks."""

import functools
import itertools

import numpy as np
import pytest
import spelled_out
from covers import cover
from hlo import collectives
from jax import lax
from reference_codec import REFERENCES, Reference, snr_db
from reference_collectives import (
    DTYPES,
    model_all_gather,
    model_all_to_all,
    model_one_shot,
    model_ppermute,
    model_psum_scatter,
    model_two_shot,
)
from shards import bits_of_every_device, per_rank

import taco_jax
from taco_jax import Codec
from taco_jax.collectives import comm_log


def ring(axis):
    """Every rank sends to the next one, the last to nobody."""
    return [(i, i + 1) for i in range(lax.axis_size(axis) - 1)]


OPERATIONS = {
    "two_shot": (model_two_shot, functools.partial(spelled_out.psum, algorithm="two_shot")),
    "one_shot": (model_one_shot, functools.partial(spelled_out.psum, algorithm="one_shot")),
    "psum": (None, spelled_out.psum),
    "psum_scatter": (model_psum_scatter, functools.partial(spelled_out.psum_scatter, scatter_dimension=1, tiled=True)),
    "all_gather": (model_all_gather, functools.partial(spelled_out.all_gather, axis=-2, tiled=True)),
    "all_gather_invarying": (model_all_gather, functools.partial(spelled_out.all_gather, tiled=True, to="invarying")),
    "all_to_all": (
        model_all_to_all, functools.partial(spelled_out.all_to_all, split_axis=1, concat_axis=0, tiled=True),
    ),
    "ppermute": (model_ppermute, lambda x, axis, **kw: spelled_out.ppermute(x, axis, ring(axis), **kw)),
}  # fmt: skip
INVARYING = ("two_shot", "one_shot", "psum", "all_gather_invarying")
GRID = {
    "operation": tuple(OPERATIONS),
    "codec": ("taco", "int5h", "mxfp4", "e5m2"),
    "ranks": (2, 4, 8),
    "dtype": tuple(DTYPES),
}


def check_operation(operation, codec, ranks, dtype, reference=None, fall=0):
    """reference: of a codec that is no preset. fall: every rank's values are 2^fall smaller than the rank's before."""
    reference = reference or REFERENCES[codec]
    model, run = OPERATIONS[operation]
    if operation == "psum":  # auto: the exchange for two ranks, else two-shot
        model = model_one_shot if ranks == 2 else model_two_shot
    exponent = -8 if codec == "taco" else None
    scales = None if exponent is None else taco_jax.SiteScales(exponents=np.array([exponent, 3], np.int32))
    rng = np.random.default_rng(ranks)
    # 3 x 8 * 17: pieces are no multiple of a block, whatever the number of ranks
    x_P = (rng.normal(size=(ranks, 3, 136)) * np.exp2(rng.integers(-3, 4, (ranks, 3, 1)))).astype(DTYPES[dtype])
    x_P *= np.exp2(-fall * np.arange(ranks)).astype(x_P.dtype)[:, None, None]
    invarying = operation in INVARYING

    def f(x):
        return run(x, "tp", codec=codec, scales=scales, site="here")

    program = per_rank(f, ranks, invarying_out=invarying)
    with comm_log.record() as table:
        lowered = program.lower(x_P)
    compiled = lowered.compile()

    expected, messages = model(reference, x_P.astype(np.float32), exponent)
    assert collectives(compiled) == sorted((opcode, "uint8", n) for opcode, n in messages)
    (row,) = table.rows()
    assert sorted(row.hlo) == collectives(compiled)
    sent = sum(n * (1 if opcode == "collective-permute" else (ranks - 1) / ranks) for opcode, n in messages)
    assert row.bytes == pytest.approx(sent)

    y = program(x_P)
    assert y.dtype == x_P.dtype
    read = [np.asarray(y)] * ranks if invarying else np.asarray(y)
    for rank in range(ranks):
        assert read[rank].shape == expected[rank].shape
        close(reference, read[rank], expected[rank].astype(x_P.dtype))
    if invarying:
        assert len(set(bits_of_every_device(y))) == 1
    assert bits_of_every_device(program(x_P)) == bits_of_every_device(y)


def close(ref, y, expected):
    if ref.rotation == "none":
        np.testing.assert_array_equal(y, expected)
    else:
        # A rotation sums in another order than the model, so now and then a code is its neighbour.
        floor = {"float32": 55, "bfloat16": 44, "float16": 55}[str(y.dtype)]
        assert snr_db(expected.astype(np.float32), y.astype(np.float32)) > floor


# Any two of the grid meet, but for e5m2, another float that is not rotated.
@pytest.mark.parametrize("operation,codec,ranks,dtype", cover(2, **{**GRID, "codec": GRID["codec"][:3]}))
def test_values_bytes_and_bits(operation, codec, ranks, dtype):
    check_operation(operation, codec, ranks, dtype)


SHORT = {"e5m0": ("e2m2", 16, "none", "e5m0"), "e4m0": ("e1m2", 8, "none", "e4m0")}


@pytest.mark.parametrize(
    "operation,fields",
    [
        ("two_shot", SHORT["e5m0"]),
        ("one_shot", SHORT["e4m0"]),
        pytest.param("two_shot", SHORT["e4m0"], marks=pytest.mark.slow),
        pytest.param("one_shot", SHORT["e5m0"], marks=pytest.mark.slow),
        *(pytest.param("psum_scatter", fields, marks=pytest.mark.slow) for fields in SHORT.values()),
    ],
)
def test_short_elements_and_scales(operation, fields):
    check_operation(operation, Codec(*fields), 4, "float32", Reference(*fields))


@pytest.mark.parametrize("operation", ["one_shot", "psum_scatter"])
def test_terms_are_added_in_rank_order(operation):
    """Sums of codes of one size are exact in float32, whatever the order; of terms that fall by 2^5 they are not."""
    check_operation(operation, "e4m3", 8, "float32", fall=5)


@pytest.mark.slow
@pytest.mark.parametrize("operation,codec,ranks,dtype", list(itertools.product(*GRID.values())))
def test_values_bytes_and_bits_everywhere(operation, codec, ranks, dtype):
    check_operation(operation, codec, ranks, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("preset", REFERENCES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_preset_in_every_collective(operation, preset):
    if preset == "taco_paper" and operation in ("psum_scatter", "all_to_all", "two_shot", "psum"):
        pytest.skip("the padding's blocks have an alpha that only XLA's square root knows")
    check_operation(operation, preset, 4, "float32")


@functools.cache
def in_taco(operation):
    return per_rank(lambda x: OPERATIONS[operation][1](x, "tp", codec="taco"), 4, invarying_out=operation in INVARYING)


@pytest.mark.parametrize("operation", ["two_shot", "one_shot", "psum_scatter", "all_gather"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_one_bad_value_on_one_rank_is_nan_on_all(operation, bad):
    x_P = np.random.default_rng(0).normal(size=(4, 4, 512)).astype(np.float32)
    f = in_taco(operation)
    good = np.asarray(f(x_P))
    x_P[2, 1, 300] = bad  # block 256..383 of row 1
    y = np.asarray(f(x_P))
    wrong = np.isnan(y)
    if operation == "psum_scatter":  # columns go to ranks: 300 is column 44 of rank 2's piece of 128
        assert wrong[2, 1].sum() >= 127 and wrong.sum() == wrong[2, 1].sum()
        assert not np.isfinite(y[2, 1]).any()
    elif operation == "all_gather":
        assert wrong[:, 2 * 4 + 1, 256:384].all() and wrong.sum() == 4 * 128
    else:
        assert wrong[1, 256:384].all() and wrong.sum() == 128
    if operation != "psum_scatter":
        np.testing.assert_array_equal(y[~wrong], good[~wrong])
