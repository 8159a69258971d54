"""The Triton kernels compile to machine code for sm_80, sm_89 and sm_90 without a GPU, and spill no register.

Kernels are compiled as the operations call them: with the arguments that a launch is given.
"""

import functools
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
from covers import cover, cover_groups
from jax.sharding import AbstractDevice, AbstractMesh
from jax.sharding import PartitionSpec as P
from triton_checks import CODECS_WITH_KERNELS

from pallas_kernels import Geometry
from pallas_kernels.triton import launch, operations
from taco_jax.codec import CODECS, Codec
from taco_jax.compression import dispatch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6'")

MATRIX = dict(
    name=tuple(CODECS_WITH_KERNELS),
    operation=("encode", "reduce_encode", "reduce_decode", "sum_decode", "decode", "encode_with_residual"),
    dtype=("bfloat16", "float16", "float32"),
    capability=(80, 89, 90),
)
TYPES = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "int32": "*i32", "uint32": "*u32",
}  # fmt: skip


def launches(codec, operation, dtype, capability, monkeypatch, elements=4 << 20, messages=4):
    """The kernel launches of an operation, as they are on a GPU of this compute capability."""
    monkeypatch.setattr(operations, "capability", lambda: divmod(capability, 10))
    monkeypatch.setattr(operations, "multiprocessors", lambda: 132)
    calls = []

    def note(call):
        calls.append(call)
        return [jnp.zeros(y.shape, y.dtype) for y in call.outputs]

    fmt, g = dispatch.to_format(codec), Geometry(elements, messages, -(-elements // messages))
    x = jax.ShapeDtypeStruct((elements,), dtype)
    wires = jax.ShapeDtypeStruct((messages, fmt.wire_bytes(g.per_message)), jnp.uint8)
    exponent = jax.ShapeDtypeStruct((), jnp.int32)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32) if codec.rounding == "stochastic" else None
    run = {
        "encode": lambda x, w, a, s: operations.encode(fmt, g, x, a, s),
        "encode_with_residual": lambda x, w, a, s: operations.encode_with_residual(fmt, g, x, a, s),
        "reduce_encode": lambda x, w, a, s: operations.reduce_encode(fmt, g, w, x, a, a, s),
        "reduce_decode": lambda x, w, a, s: operations.reduce_decode(fmt, g, w, x, a, a),
        "sum_decode": lambda x, w, a, s: operations.sum_decode(fmt, w, g.per_message, dtype, a),
        "decode": lambda x, w, a, s: operations.decode(fmt, g, w, dtype, a),
    }[operation]
    monkeypatch.setattr(launch, "_launcher", note)
    jax.eval_shape(run, x, wires, exponent, seed)
    return calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where kernels are compiled."""
    return tmp_path_factory.mktemp("triton")


def compiled(call, capability, folder) -> str:
    """PTX of a launch."""
    from pallas_kernels.triton import kernels

    kernel = getattr(kernels, call.kernel)
    arrays = [TYPES[str(x.dtype)] for x in call.arrays]
    sizes = ["i64" if size < -(2**31) else "i32" for size in call.sizes]
    types = (*arrays, *sizes, *(TYPES[str(y.dtype)] for y in call.outputs))
    return _compiled(kernel, types, call.recipe, call.warps, capability, folder)


@functools.cache
def _compiled(kernel, types, recipe, warps, capability, folder) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.triton import kernels

    source = ASTSource(
        kernel,
        signature=dict(zip(kernel.arg_names, [*types, "constexpr"], strict=True)),
        constexprs={(len(types),): kernels.Constants(recipe)},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")},
    )
    options = dict(num_warps=warps, num_stages=recipe.stages, enable_fp_fusion=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


@functools.cache
def assembled(ptx, capability, folder) -> str:
    """What ptxas says of registers."""
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    ptxas = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    architecture = "sm_90a" if capability == 90 else f"sm_{capability}"
    arguments = [ptxas, "-v", f"-arch={architecture}", path, "-o", folder / "kernel.cubin"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stderr


def check(case, folder, monkeypatch):
    name, operation, dtype, capability = case
    for call in launches(CODECS_WITH_KERNELS[name], operation, dtype, capability, monkeypatch):
        ptx = compiled(call, capability, folder)
        said = assembled(ptx, capability, folder)
        assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said
        # Values and codes are read and written in words, not one by one.
        assert not re.search(r"(ld|st)\.global\.b16", ptx)


def named(case) -> str:
    return "-".join(map(str, case))


# Casts go by dtype and capability, and by codec.
FEW = cover_groups([("operation",), ("dtype", "capability"), ("name",)], **MATRIX)


@pytest.mark.parametrize("case", FEW, ids=named)
def test_compiles_without_spills(case, folder, monkeypatch):
    check(case, folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("operation", MATRIX["operation"])
@pytest.mark.parametrize("name", MATRIX["name"])
def test_more_compile_without_spills(name, operation, folder, monkeypatch):
    for case in cover(3, **MATRIX):
        if case[:2] == (name, operation):
            check(case, folder, monkeypatch)


OTHERS = [
    Codec("int8", 256, "signed_hadamard", "site", "stochastic"),
    Codec("e4m3", 256, "hadamard", "float32"),
    Codec("int5", 32, "hadamard", "ue5m3"),
]


@pytest.mark.parametrize(
    "codec,operation",
    [
        (OTHERS[0], "encode"),
        (OTHERS[1], "decode"),
        pytest.param(OTHERS[2], "encode", marks=pytest.mark.slow),
        pytest.param(OTHERS[0], "decode", marks=pytest.mark.slow),
        pytest.param(OTHERS[1], "encode", marks=pytest.mark.slow),
        pytest.param(OTHERS[2], "decode", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_other_codecs_compile(codec, operation, folder, monkeypatch):
    for call in launches(codec, operation, "bfloat16", 80, monkeypatch):
        assembled(compiled(call, 80, folder), 80, folder)


def test_more_than_2_31_elements_compile(folder, monkeypatch):
    for call in launches(CODECS["taco"], "encode", "bfloat16", 90, monkeypatch, 2**33 + 1, 2):
        assert min(call.sizes) < -(2**32)
        assembled(compiled(call, 90, folder), 90, folder)


def test_casts_are_the_hardwares_where_they_round_once(folder, monkeypatch):
    def ptx(operation, capability):
        (call,) = launches(CODECS["taco"], operation, "bfloat16", capability, monkeypatch)
        return compiled(call, capability, folder)

    assert "e4m3" not in ptx("encode", 80) + ptx("decode", 80) + ptx("encode", 89)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx("encode", 90)
    assert "cvt.rn.f16x2.e4m3x2" in ptx("decode", 89)


def test_operations_lower_through_jax_triton():
    pytest.importorskip("jax_triton", reason="jax-triton needs a GPU build of jax", exc_type=ImportError)
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    fmt, g = dispatch.to_format(CODECS["taco"]), Geometry(4 << 18, 4, 1 << 18)

    def psum(x):
        wires, _ = operations.encode(fmt, g, x)
        wires = jax.lax.all_to_all(wires, "tp", 0, 0, tiled=True)
        wire, _ = operations.reduce_encode(fmt, g, wires, x, jax.lax.axis_index("tp"))
        return operations.decode(fmt, g, jax.lax.all_gather(wire, "tp"), x.dtype)

    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(jax.shard_map(psum, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
        traced = run.trace(jax.ShapeDtypeStruct((16 << 18,), jnp.bfloat16))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 3


def test_a_missing_package_is_named(monkeypatch):
    load = launch.importlib.import_module

    def missing(name, *rest):
        if name != "jax_triton":
            return load(name, *rest)  # jax imports parts of itself when they are first needed
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(launch.importlib, "import_module", missing)
    fmt = dispatch.to_format(CODECS["taco"])
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'taco-jax\[triton\]'") as error:
        jax.eval_shape(functools.partial(operations.encode, fmt, Geometry(8, 1, 8)), jnp.zeros(8, jnp.bfloat16))
    assert "\n" not in str(error.value)
