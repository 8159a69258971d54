"""Compiles the GPU kernels for GPUs that this machine does not have: registers, spills, memory, programs at once.

    python experiments/kernel_targets.py --out experiments/results/kernel_targets

Needs no GPU: an environment with triton, and for Mosaic's kernels the extra `aot` (jax's CUDA plugin and ptxas). Triton
kernels are compiled as an operation launches them on a device of that name, and assembled with the options of jaxlib;
Mosaic's are compiled by XLA for a description of the GPU. A kernel that does not compile has the reason in its row.
`--keep FOLDER` remembers what was compiled, by the kernel's code: a run that was killed goes on from there.

output    OUT/README.md (hardware, commit, command, tables), OUT/summary.json
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import runs
from gpu_targets import MAIN, MOSAIC, TARGETS, architecture, on_target
from jax.sharding import AbstractDevice, AxisType
from kernel_targets_report import cell, report

from pallas_kernels import Geometry, mosaic
from pallas_kernels.triton import launch, operations
from taco_jax.codec import CODECS, Codec
from taco_jax.compression import dispatch
from taco_jax.config import cli

OPERATIONS = ("encode", "reduce_encode", "reduce_decode", "sum_decode", "decode")
OVER_NVLINK = ("taco", "int4h", "mxfp4")
RANKS = 4
ELEMENTS = 1 << 28  # of x: more tiles than programs, on every GPU
TRITON_TYPES = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "int32": "*i32", "uint32": "*u32",
}  # fmt: skip
H100 = Path(__file__).resolve().parent.parent / "tests" / "aot" / "h100.txtpb"


def operation(kernels, codec: Codec, name: str, dtype: str):
    """Returns (function, shapes of x, wires, exponent, rank, seed) of an operation of a kernel package."""
    fmt, g = dispatch.to_format(codec, encodes="encode" in name), Geometry(ELEMENTS, RANKS, ELEMENTS // RANKS)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = (
        jax.ShapeDtypeStruct((ELEMENTS,), dtype),
        jax.ShapeDtypeStruct((RANKS, fmt.wire_bytes(g.per_message)), jnp.uint8),
        number if fmt.scale in ("ue5m3", "site") else None,
        number,
        jax.ShapeDtypeStruct((2,), jnp.uint32) if fmt.rounding == "stochastic" else None,
    )
    run = {
        "encode": lambda x, w, e, r, s: kernels.encode(fmt, g, x, e, s),
        "reduce_encode": lambda x, w, e, r, s: kernels.reduce_encode(fmt, g, w, x, r, e, s),
        "reduce_decode": lambda x, w, e, r, s: kernels.reduce_decode(fmt, g, w, x, r, e),
        "sum_decode": lambda x, w, e, r, s: kernels.sum_decode(fmt, w, g.per_message, dtype, e),
        "decode": lambda x, w, e, r, s: kernels.decode(fmt, g, w, dtype, e),
    }[name]
    return run, shapes


# Triton


def launches(codec: Codec, name: str, dtype: str, capability: int) -> list[launch.Launch]:
    """Returns the kernel launches of an operation on a GPU of this compute capability."""
    calls = []

    def note(call):
        calls.append(call)
        return [jnp.zeros(y.shape, y.dtype) for y in call.outputs]

    launch.set_launcher(note)
    try:
        with on_target(capability):
            run, shapes = operation(operations, codec, name, dtype)
            jax.eval_shape(run, *shapes)
    finally:
        launch.set_launcher(None)
    return calls


def lowered(call: launch.Launch, capability: int):
    """Returns (source, Triton's back end, its options, its first module) of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_kernels.triton import kernels

    kernel = getattr(kernels, call.kernel)
    sizes = ["i64" if size < -(2**31) else "i32" for size in call.sizes]
    arrays, outputs = ([TRITON_TYPES[str(x.dtype)] for x in several] for several in (call.arrays, call.outputs))
    types = (*arrays, *sizes, *outputs)
    source = ASTSource(
        kernel,
        signature=dict(zip(kernel.arg_names, [*types, "constexpr"], strict=True)),
        constexprs={(len(types),): kernels.Constants(call.recipe)},
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*")},
    )
    target = GPUTarget("cuda", capability, 32)
    backend = triton.compiler.make_backend(target)
    # As jax-triton is called in `pallas_kernels/triton/launch.py`.
    options = dict(num_warps=call.warps, num_stages=call.recipe.stages, enable_fp_fusion=False)
    options = backend.parse_options(options)
    context = triton._C.libtriton.ir.context()
    triton._C.libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return source, backend, options, source.make_ir(target, options, functions, modules, context)


def compile_launch(call: launch.Launch, capability: int, kept: Path | None = None) -> dict:
    """Returns what the compilers say of a Triton launch: registers, spills and bytes of memory.

    Raises RuntimeError where it does not compile. kept: a folder of what was found before.
    """
    first = lowered(call, capability)

    def compiled() -> dict:
        code, metadata = ptx(*first)
        return assembled(code, architecture(capability)) | {
            "shared": metadata["shared"],
            "tensor_columns": metadata.get("tmem_size") or 0,
            "warps": metadata.get("num_warps", call.warps),
        }

    _, _, options, module = first
    return remembered(kept, f"{module} {options} {capability} {ptxas()[1]}", compiled)


def ptx(source, backend, options, module) -> tuple[str, dict]:
    """Returns (PTX, Triton's metadata) of what `lowered` returned, which is changed."""
    stages: dict = {}
    metadata: dict = {}
    backend.add_stages(stages, options, source.language)
    for stage in ("ttir", "ttgir", "llir", "ptx"):
        module = stages[stage](module, metadata)
    return module, metadata


def remembered(kept: Path | None, key: str, make: Callable[[], dict]) -> dict:
    """Returns make(), or what it returned for this key before."""
    if kept is None:
        return make()
    path = kept / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not path.is_file():
        found = make()
        path.write_text(json.dumps(found))
    return json.loads(path.read_text())


@functools.cache
def ptxas() -> tuple[str, str]:
    """(path, release) of the assembler: that of the extra `aot`, which jax would take; else Triton's own."""
    for package, folder in (("nvidia", "cu13/bin"), ("nvidia", "cuda_nvcc/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for root in [] if spec is None else spec.submodule_search_locations:
            for name in ("ptxas-blackwell", "ptxas"):
                path = Path(root) / folder / name
                if path.is_file():
                    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
                    return str(path), re.search(r"V([\d.]+)", said)[1]
    raise runs.ConfigError("ptxas: not found; install triton, or the extra 'aot'")


def assembled(code: str, arch: str) -> dict:
    """Returns registers and spilled bytes of a thread, as ptxas reports them. Raises RuntimeError with its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(code)
        command = [ptxas()[0], "-v", f"-arch={arch}", path, "-o", Path(folder) / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(next(iter(errors(done.stderr)), done.stderr[:200]))
    return reported(done.stderr)[0]


def reported(ptxas_said: str) -> list[dict]:
    """Returns {registers, spilled (bytes stored), stack} of each kernel in what ptxas said."""
    pattern = r"(\d+) bytes stack frame, (\d+) bytes spill stores.*?Used (\d+) registers"
    found = re.findall(pattern, ptxas_said, re.DOTALL)
    return [{"registers": int(r), "spilled": int(s), "stack": int(t)} for t, s, r in found]


def errors(text: str) -> list[str]:
    """Returns the errors in a compiler's output, each once, without places in files."""
    return list(dict.fromkeys(m.strip() for m in re.findall(r"(?:error|fatal)\s*: (.*)", text)))


def triton_row(codec: str, name: str, dtype: str, capability: int, kept: Path | None = None) -> dict:
    """Returns one row of the table: an operation is one launch, or two where a message has one scale."""
    target, row = TARGETS[capability], {}
    for call in launches(CODECS[codec], name, dtype, capability):
        try:
            found = compile_launch(call, capability, kept)
        except Exception as error:  # what does not compile is a fact of the table
            return {"reason": next(iter(errors(str(error))), f"{type(error).__name__}: {str(error).splitlines()[0]}")}
        found["resident"] = target.resident(
            found["warps"], found["registers"], found["shared"], found["tensor_columns"]
        )
        found["programs"] = round(math.prod(call.grid) / target.multiprocessors)
        if not row or found["registers"] > row["registers"]:
            row = found
    return row


# Mosaic


@functools.cache
def mosaic_devices(capability: int, count: int = 1):
    """So many GPUs of one host by XLA's description: the H100's, with another capability for others."""
    from jax.experimental import topologies

    text = H100.read_text()
    if capability != 90:
        target = TARGETS[capability]
        text = re.sub(r"(cuda_compute_capability \{\s+major:) 9", rf"\1 {capability // 10}", text)
        text = text.replace("core_count: 132", f"core_count: {target.multiprocessors}")
        text = text.replace("NVIDIA H100 80GB HBM3", target.device)
    return topologies.get_topology_desc(
        topology_name=f"sm_{capability}", platform="cuda", target_config=text, topology=f"1x1x{count}"
    ).devices


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Collects what the process writes to stdout and stderr, compilers in C++ included."""
    found: list[str] = []
    sys.stdout.flush(), sys.stderr.flush()
    with tempfile.TemporaryFile("w+") as file:
        before = [os.dup(n) for n in (1, 2)]
        try:
            for n in (1, 2):
                os.dup2(file.fileno(), n)
            yield found
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for n, kept in zip((1, 2), before):
                os.dup2(kept, n)
                os.close(kept)
            file.seek(0)
            found.append(file.read())


def compile_mosaic(f, arguments, capability: int) -> dict:
    """Returns what ptxas says of the one Mosaic kernel of a program, with the shared memory and warps of its launch.

    Raises RuntimeError where it was compiled for another GPU, as in a process that had compiled for one before.
    """
    from jax.experimental.mosaic.gpu import core

    modules, serialize = [], core._run_serde_pass

    def spy(module, **options):
        if options.get("serialize", True):
            modules.append(module.operation.get_asm(enable_debug_info=False))
        return serialize(module, **options)

    error = None
    core._run_serde_pass = spy
    try:
        with captured() as said:
            try:
                jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
            except Exception as raised:  # what does not compile is a fact of the table
                error = raised
    finally:
        core._run_serde_pass = serialize
    if error is not None:
        reason = next(iter(errors(said[0])), f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return {"reason": reason.replace("'", "")}
    if f"for '{architecture(capability)}'" not in said[0]:
        raise RuntimeError(f"not compiled for {architecture(capability)}: {said[0][:300]}")
    row = max(reported(said[0]), key=lambda kernel: kernel["registers"])
    launched = re.search(r"threads\(.*? = %c(\d+)\w*,.*?dynamic_shared_memory_size %c(\d+)", modules[-1])
    return row | {"shared": int(launched[2]), "warps": int(launched[1]) // 32}


@functools.cache
def sources() -> str:
    """Returns a digest of what Mosaic's kernels are made of."""
    root = Path(mosaic.__file__).parent.parent
    files = [path for name in ("mosaic", "nvlink", "matmul_all_reduce") for path in sorted((root / name).rglob("*.py"))]
    files += [root / "formats.py", root / "compat.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def mosaic_row(codec: str, name: str, dtype: str, capability: int, kept: Path | None = None) -> dict:
    """Returns one row of the table, of an operation on one GPU."""
    from jax.sharding import SingleDeviceSharding

    where = SingleDeviceSharding(mosaic_devices(capability)[0])
    run, shapes = operation(mosaic, CODECS[codec], name, dtype)
    arguments = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes)
    key = f"mosaic {codec} {name} {dtype} {capability} {ptxas()[1]} {jax.__version__} {sources()}"
    return remembered(kept, key, lambda: compile_mosaic(run, arguments, capability))


def nvlink_row(codec: str, capability: int, product: bool = False, kept: Path | None = None) -> dict:
    """Returns the row of a sum over two GPUs as one kernel over NVLink, or of a product with its sum."""
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels import matmul_all_reduce, nvlink
    from taco_jax.compat import as_varying

    ranks, fmt = 2, dispatch.to_format(CODECS[codec])
    mesh = Mesh(np.array(mosaic_devices(capability, ranks)), ("tp",), axis_types=(AxisType.Auto,))
    if product:
        run = lambda x, w: matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp", jnp.int32(-3))[0]
        sizes = ((2048, 1152), (1152, 1024))
    else:
        geometry = Geometry(ELEMENTS, 1, ELEMENTS)
        run = lambda x: nvlink.all_reduce(fmt, geometry, x, "tp")[0]
        sizes = ((ELEMENTS,),)
    own = lambda *xs: as_varying(run(*(x[0] for x in xs)), ("tp",)).reshape(1, -1)
    where = NamedSharding(mesh, P("tp"))
    arguments = [jax.ShapeDtypeStruct((ranks, *size), jnp.bfloat16, sharding=where) for size in sizes]
    program = jax.shard_map(own, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    key = f"nvlink {codec} {product} {capability} {ptxas()[1]} {jax.__version__} {sources()}"
    return remembered(kept, key, lambda: compile_mosaic(program, arguments, capability))


def nvlink_rows(codecs: Sequence[str], capability: int, kept: Path | None) -> dict[str, dict]:
    """Returns {kernel: row} of those of `OVER_NVLINK` that are asked for."""
    found = {f"sum, {codec}": nvlink_row(codec, capability, kept=kept) for codec in OVER_NVLINK if codec in codecs}
    if "taco" in codecs:
        found["product and sum, taco"] = nvlink_row("taco", capability, product=True, kept=kept)
    return found


# All of it


def rows_of(backend: str, capability: int, cases: Sequence[tuple[str, str]], names: Sequence[str], kept) -> dict:
    """Returns {dtype: {codec: {operation: row}}} of a target; prints each row as it comes. cases: (dtype, codec)."""
    make, found = {"triton": triton_row, "mosaic": mosaic_row}[backend], {}
    for (dtype, codec), name in itertools.product(cases, names):
        row = make(codec, name, dtype, capability, kept)
        found.setdefault(dtype, {}).setdefault(codec, {})[name] = row
        print(architecture(capability), backend, codec, name, dtype, row.get("reason") or cell(row), flush=True)
    return found


def chosen(capability: int) -> dict[str, dict[str, list[str]]]:
    """Returns {codec: {operation: (what `taco_jax` runs there, why)}}, with jax-triton or without."""
    target = TARGETS[capability]
    device = AbstractDevice(device_kind=target.device, num_cores=target.multiprocessors, platform="gpu")
    return {
        codec: {name: list(dispatch.choose(codec, device, "bfloat16", operation=name)) for name in dispatch.OPERATIONS}
        for codec in runs.WITH_KERNELS
    }


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default=",".join(map(str, MAIN)), help=f"of {', '.join(map(str, TARGETS))}")
    parser.add_argument("--codecs", default=",".join(runs.WITH_KERNELS))
    parser.add_argument("--operations", default=",".join(OPERATIONS))
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--float32", default="", help="codecs that Triton compiles for float32 too")
    parser.add_argument("--backends", default="triton,mosaic")
    parser.add_argument("--keep", type=Path, help="folder of Triton kernels that were compiled before")
    parser.add_argument("--commit", default=None, help="commit to name where there is no git")
    args = parser.parse_args(arguments)
    codecs = runs.codecs_with_kernels(args.codecs)
    targets = [int(name) for name in runs.choices("--targets", args.targets, map(str, TARGETS))]
    names = runs.choices("--operations", args.operations, OPERATIONS)
    wide = runs.codecs(args.float32, pairs=False, exact=False) if args.float32 else []
    dtypes = runs.choices("--dtypes", args.dtypes, ("bfloat16", "float16", "float32"))
    backends = runs.choices("--backends", args.backends, ("triton", "mosaic"))
    if "triton" in backends:
        runs.packages("triton", install="pip install 'triton>=3.6'")
    if "mosaic" in backends:
        runs.packages("jax_cuda13_plugin", install="pip install '.[aot]', or leave mosaic out of --backends")
    runs.folder("--out", args.out)
    if args.keep is not None:
        runs.folder("--keep", args.keep)
    jax.config.update("jax_platforms", "cpu")
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    os.environ["PATH"] = f"{Path(ptxas()[0]).parent}{os.pathsep}{os.environ['PATH']}"
    found: dict = {"ptxas": ptxas()[1], "triton": {}, "mosaic": {}, "nvlink": {}}
    if "triton" in backends:
        cases = [(dtype, codec) for dtype in dtypes for codec in codecs]
        cases += [("float32", codec) for codec in wide if ("float32", codec) not in cases]
        for capability in targets:
            found["triton"][architecture(capability)] = rows_of("triton", capability, cases, names, args.keep)
    for capability in [c for c in targets if "mosaic" in backends and c in MOSAIC]:
        # XLA compiles the Mosaic kernels of a process for the GPU of its first one.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            cases = [(dtype, codec) for dtype in dtypes for codec in codecs]
            rows = process.submit(rows_of, "mosaic", capability, cases, names, args.keep).result()
            found["mosaic"][architecture(capability)] = rows
            found["nvlink"][architecture(capability)] = process.submit(
                nvlink_rows, codecs, capability, args.keep
            ).result()
    found["chosen"] = {architecture(capability): chosen(capability) for capability in targets}
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton_version"] = triton.__version__
    (args.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "README.md").write_text(report(found, args.commit))


if __name__ == "__main__":
    sys.exit(cli.run(main))
