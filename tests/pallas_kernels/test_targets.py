"""The Triton kernels as they are compiled for every kind of GPU: no spills, memory that a program can have, and no last
round of programs that leaves most of a GPU idle. Compiled by `experiments/kernel_targets.py`, whose record this checks.
"""

import importlib
import json
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import REPOSITORY

from taco_jax import CODECS, Codec
from taco_jax.compression import dispatch

RECORD = REPOSITORY / "experiments" / "results" / "kernel_targets" / "summary.json"
# Each target in another operation and codec; every operation, and every way of packing.
FEW = (
    (80, "taco", "reduce_decode"), (86, "int4h", "reduce_encode"), (89, "mxfp8", "encode"),
    (100, "int8h", "encode"), (100, "mxfp6", "sum_decode"), (120, "int6h", "decode"),
)  # fmt: skip
KEY = ("taco", "int8h", "int4h", "mxfp4")


@pytest.fixture(scope="module")
def targets():
    """experiments/kernel_targets.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPOSITORY / "experiments")
        return importlib.import_module("kernel_targets")


def check(targets, row, capability):
    assert "reason" not in row, row
    assert row["spilled"] == row["stack"] == 0, row
    assert row["shared"] <= 1024 * targets.TARGETS[capability].shared_of_block
    # All programs at once, or so many rounds that an incomplete last one is a small part.
    assert row["programs"] <= row["resident"] or row["programs"] >= 3 * row["resident"] > 0, row


@pytest.mark.parametrize("capability,codec,operation", FEW)
def test_compiles_for_each_kind_of_gpu(capability, codec, operation, targets):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")
    check(targets, targets.triton_row(codec, operation, "bfloat16", capability), capability)


@pytest.mark.parametrize(
    "capability,operation,cast",
    [
        (100, "encode", "cvt.rn.satfinite.e4m3x2.f32"),
        (120, "decode", "cvt.rn.f16x2.e4m3x2"),
    ],
)
def test_blackwell_casts_once_and_rotates_by_the_instruction_of_all_gpus(capability, operation, cast, targets):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")
    (call,) = targets.launches(CODECS["taco"], operation, "bfloat16", capability)
    code, _ = targets.ptx(*targets.lowered(call, capability))
    assert set(re.findall(r"cvt\S*e4m3\S*", code)) == {cast}
    assert "mma.sync.aligned.m16n8k16" in code and "tcgen05" not in code
    assert not re.search(r"(fma|mad)\.\S*f32", code)  # products and sums round one by one


@pytest.mark.slow
@pytest.mark.parametrize("capability", (80, 86, 89, 90, 100, 120))
@pytest.mark.parametrize("codec", KEY)
def test_the_record_is_what_the_compilers_say(capability, codec, targets):
    triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")
    record = json.loads(RECORD.read_text())
    same = (record["triton_version"], record["ptxas"]) == (triton.__version__, targets.ptxas()[1])
    operations = record["triton"][targets.architecture(capability)]["bfloat16"][codec]
    assert set(operations) == set(targets.OPERATIONS)
    for operation, recorded in operations.items():
        row = targets.triton_row(codec, operation, "bfloat16", capability)
        if same:
            assert row == recorded
        # Mosaic has these codecs on Hopper.
        assert (row["spilled"] == 0 or capability == 90) and row["resident"] > 0


def test_occupancy_by_hand(targets):
    a100, b200, rtx = (targets.TARGETS[capability] for capability in (80, 100, 86))
    assert a100.resident(warps=4, registers=128, shared=1024) == 4  # 65536 / (128 * 128)
    assert a100.resident(warps=4, registers=129, shared=1024) == 3  # registers come in eights
    assert a100.resident(warps=4, registers=32, shared=1024) == 16  # 64 warps
    assert rtx.resident(warps=4, registers=32, shared=1024) == 12  # 48 warps
    assert rtx.resident(warps=4, registers=32, shared=50 * 1024 - 1024) == 2  # 100 KiB, of which each has one more
    assert rtx.resident(warps=4, registers=32, shared=50 * 1024) == 1
    assert rtx.resident(warps=4, registers=32, shared=100 * 1024) == 0  # 99 KiB for one
    assert b200.resident(warps=4, registers=32, shared=1024, tensor_columns=256) == 2


def test_what_ptxas_says_is_read(targets):
    said = """ptxas info    : Function properties for k
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 101 registers, used 1 barriers, 8 bytes cumulative stack size"""
    assert targets.reported(said) == [{"registers": 101, "spilled": 4, "stack": 8}]
    assert targets.errors("ptxas x.ptx, line 9; error   : No such\nptxas fatal   : Ptx assembly aborted") == [
        "No such", "Ptx assembly aborted",
    ]  # fmt: skip


def test_a_row_of_a_gpu_that_the_assembler_does_not_know(targets, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")
    monkeypatch.setattr(
        targets, "compile_launch", lambda *_: targets.assembled(".version 8.8\n.target sm_999", "sm_80")
    )
    row = targets.triton_row("mxfp4", "decode", "bfloat16", 80)
    assert set(row) == {"reason"} and "sm_999" in row["reason"]


def test_the_report_has_every_row(targets, monkeypatch):
    monkeypatch.setattr(targets.runs, "hardware", lambda: "none")  # asks in a process of its own
    good = {"registers": 99, "spilled": 0, "stack": 0, "shared": 2048, "warps": 4, "resident": 5, "programs": 4}
    bad = {"reason": "wgmma is not supported on sm_100a"}
    found = {
        "ptxas": "13.0", "triton_version": "3.6.0",
        "triton": {"sm_80": {"bfloat16": {"taco": {"encode": good, "decode": good | {"spilled": 8}}}}},
        "mosaic": {"sm_100a": {"bfloat16": {"taco": {"encode": bad}}}},
        "nvlink": {"sm_100a": {"sum, taco": bad}},
        "chosen": {"sm_80": {"taco": {"encode": ["triton", "runs triton"], "decode": ["jnp", "no jax-triton"]}}},
    }  # fmt: skip
    text = targets.report(found, "abc")
    assert "| taco encode | 99 / 2 / 5 of 4 |" in text and "| taco decode | 99 (8 B spilled) / 2 / 5 of 4 |" in text
    assert "| sm_80 | 2 | 2 | 1 | 99 | 2 (163) |" in text
    assert "* sm_100a: wgmma is not supported on sm_100a: taco encode bfloat16" in text
    assert "| sm_80 | NVIDIA A100-SXM4-80GB | all | jnp; triton | no jax-triton; runs triton |" in text


# Without jax-triton


def test_a_gpu_without_jax_triton_is_told_once_and_runs_the_jnp_codec(targets, monkeypatch):
    from pallas_kernels import dispatch as kernels

    monkeypatch.setattr(kernels, "_triton_missing", lambda: "triton kernels need jax-triton: pip install it")
    dispatch._warn_once.cache_clear()
    codec, x = CODECS["taco"], jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    geometry = dispatch.Geometry(4096, 1, 4096)
    with targets.on_target(100):
        encode = lambda x: dispatch.encode(codec, geometry, x)[0]
        with pytest.warns(UserWarning) as caught, dispatch.record() as choices:
            text = jax.jit(encode).trace(x).lower(lowering_platforms=("cuda",)).as_text()
            jax.eval_shape(lambda x: encode(x + 1), x)
    (warning,) = caught
    assert str(warning.message) == (
        "NVIDIA B200 (compute capability 10.0): triton kernels need jax-triton: pip install it; "
        "without them codecs run in plain XLA"
    )
    assert choices == {("taco", "encode"): [("jnp", "triton kernels need jax-triton: pip install it")]}
    assert "triton_kernel_call" not in text and "mosaic" not in text
    dispatch._warn_once.cache_clear()


def test_codecs_that_no_package_would_bring_kernels_for_warn_of_nothing(targets, monkeypatch, recwarn):
    from pallas_kernels import dispatch as kernels

    monkeypatch.setattr(kernels, "_triton_missing", lambda: "triton kernels need jax-triton: pip install it")
    dispatch._warn_once.cache_clear()
    for codec in (CODECS["tah4"], Codec("e2m2", 64, "hadamard", "e8m0")):
        with targets.on_target(80):
            assert dispatch.implementation(codec, "encode", "bfloat16", 4096) == "jnp"
    with targets.on_target(90):  # Mosaic's is there
        assert dispatch.implementation(CODECS["taco"], "encode", "bfloat16", 4096) == "mosaic"
    assert not recwarn.list
