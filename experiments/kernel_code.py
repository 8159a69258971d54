"""Hashes the code of the GPU kernels, to show that a change of their sources leaves it as it was. Needs no GPU.

    python experiments/kernel_code.py --out before.json        # in the checkout before the change
    python experiments/kernel_code.py --out after.json --against before.json

Lowers for CUDA: the five operations of the Mosaic kernels for every preset and for many formats, sizes and dtypes; the
NVLink collectives; matmuls with their all-reduce. A hash is of a Mosaic module's text without locations and without the
kernel's own name, so equal hashes mean equal instructions: the same values at the same speed. Needs jax 0.11 or newer.
Exit code 1 where a program differs or is missing.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import Format, Geometry, matmul_all_reduce, mosaic, nvlink
from pallas_kernels.formats import KERNEL_ELEMENTS
from taco_jax import CODECS
from taco_jax.compat import as_varying
from taco_jax.compression.dispatch import to_format, without_format

KINDS = ("two_shot", "one_shot", "reduce_scatter", "all_gather")
OPERATIONS = ("encode", "reduce_encode", "reduce_decode", "sum_decode", "decode")
DTYPES = ("bfloat16", "float16", "float32")
PRESETS = tuple(name for name, codec in CODECS.items() if not (codec.exact or without_format(codec)))
SCALES, ROTATIONS = ("ue5m3", "bfloat16", "e8m0", "float32"), ("hadamard", "none", "signed_hadamard")
# (elements of a message, messages): few and many tiles for each CTA, and a ragged end.
SHAPES = ((256 * 64 * 132 * 4, 4), (256 * 64 * 132 * 64, 4), (2 * 64 * 256, 4), (8192 + 37, 2))


def operation(fmt, name: str, dtype: str, n: int, messages: int):
    """Returns (function, shapes) of one operation of the Mosaic kernels, None where they do not have it."""
    geometry = Geometry(n * messages, messages, n)
    kind = name if name in ("encode", "decode") else "reduce"
    if mosaic.why_unsupported(fmt, kind, dtype, geometry) is not None:
        return None
    x = jax.ShapeDtypeStruct((geometry.elements,), dtype)
    wires = jax.ShapeDtypeStruct((messages, fmt.wire_bytes(n)), jnp.uint8)
    number = jax.ShapeDtypeStruct((), jnp.int32)
    exponent = number if fmt.scale in ("ue5m3", "site") else None
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32) if fmt.rounding == "stochastic" else None
    run = {
        "encode": lambda x, w, r, e, s: mosaic.encode(fmt, geometry, x, e, s),
        "reduce_encode": lambda x, w, r, e, s: mosaic.reduce_encode(fmt, geometry, w, x, r, e, s),
        "reduce_decode": lambda x, w, r, e, s: mosaic.reduce_decode(fmt, geometry, w, x, r, e),
        "sum_decode": lambda x, w, r, e, s: mosaic.sum_decode(fmt, w, n, dtype, e),
        "decode": lambda x, w, r, e, s: mosaic.decode(fmt, geometry, w, dtype, e),
    }[name]
    return run, (x, wires, number, exponent, seed)


def on_ranks(f, ranks: int, *shapes):
    """Returns (function, shapes) of f on every rank of an axis tp, each with operands of its own."""
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,))
    own = lambda *xs: as_varying(f(*(x[0] for x in xs)), ("tp",)).reshape(1, -1)
    whole = tuple(jax.ShapeDtypeStruct((ranks, *s.shape), s.dtype) for s in shapes)
    return jax.shard_map(own, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), whole


def collective(fmt, kind: str, dtype: str, ranks: int):
    """Returns (function, shapes) of one NVLink collective."""
    n = 8 * 128 * 8 * 132 * 16
    run, size = {
        "two_shot": (lambda x: nvlink.all_reduce(fmt, Geometry(x.size, ranks, n), x, "tp")[0], n * ranks),
        "one_shot": (lambda x: nvlink.all_reduce(fmt, Geometry(x.size, 1, n), x, "tp")[0], n),
        "reduce_scatter": (lambda x: nvlink.reduce_scatter(fmt, x.reshape(ranks, n), "tp")[0], n * ranks),
        "all_gather": (lambda x: nvlink.all_gather(fmt, x, "tp")[0], n),
    }[kind]
    return on_ranks(run, ranks, jax.ShapeDtypeStruct((size,), dtype))


def matmul(fmt, ranks: int, transposed: bool):
    """Returns (function, shapes) of one matmul with its all-reduce."""
    run = lambda x, w: matmul_all_reduce.matmul_all_reduce(fmt, x, w, "tp", jnp.int32(-3), transposed=transposed)[0]
    w = (1024, 1152) if transposed else (1152, 1024)
    return on_ranks(run, ranks, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 1152), w)))


def programs() -> dict[str, tuple]:
    """Returns {name: (function, shapes)}."""
    found = {}
    for k, (preset, name) in enumerate(itertools.product(PRESETS, OPERATIONS)):
        fmt = to_format(CODECS[preset], encodes="encode" in name)
        found[f"preset {preset} {name}"] = operation(fmt, name, DTYPES[k % 3], *SHAPES[k % 2])
    for k, (element, block, name) in enumerate(itertools.product(KERNEL_ELEMENTS, (32, 64, 128, 256), OPERATIONS)):
        # Each pair of the other fields comes up: 4, 3, 3 and 4 have no common divisor with where they turn.
        scale, rotation = SCALES[(k + k // 4) % 4], ROTATIONS[(k + k // 5) % 3]
        rounding = "stochastic" if "encode" in name and k % 7 == 0 else "nearest"
        fmt = Format(element, block, rotation, scale, rounding)
        shape = SHAPES[(k + k // 6) % 4]
        found[f"{fmt} {name} {DTYPES[k % 3]} {shape}"] = operation(fmt, name, DTYPES[k % 3], *shape)
    for k, (kind, preset) in enumerate(itertools.product(KINDS, PRESETS)):
        fmt, dtype, ranks = to_format(CODECS[preset]), DTYPES[k % 2], (2, 4, 8)[k % 3]
        found[f"nvlink {kind} {preset} {dtype} {ranks}"] = collective(fmt, kind, dtype, ranks)
    for preset, ranks, transposed in itertools.product(("taco", "int8h", "int6h", "int4h"), (2, 4), (False, True)):
        found[f"matmul {preset} {ranks} {transposed}"] = matmul(to_format(CODECS[preset]), ranks, transposed)
    return {name: program for name, program in found.items() if program is not None}


def hashes() -> dict[str, list[str]]:
    """Returns {program: hashes of its Mosaic modules, or why it does not lower}."""
    modules, serialize = [], core._run_serde_pass

    def spy(module, **options):
        if options.get("serialize", True):
            text = module.operation.get_asm(enable_debug_info=False)
            name = re.search(r"module @(\w+)", text)[1]
            text = re.sub(rf"{name}(_\d+)?", "kernel", text)
            modules.append(hashlib.sha256(text.encode()).hexdigest()[:24])
        return serialize(module, **options)

    core._run_serde_pass = spy
    found = {}
    for name, (f, shapes) in programs().items():
        modules.clear()
        try:
            jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",))
            found[name] = sorted(modules)
        except Exception as error:  # a kernel that does not fit is a fact to compare, too
            found[name] = [f"{type(error).__name__}: {str(error)[:80]}"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    found = hashes()
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    kernels = {value for values in found.values() for value in values if ":" not in value}
    print(f"{len(found)} programs, {len(kernels)} different kernels")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())
    different = sorted(name for name in before.keys() | found.keys() if before.get(name) != found.get(name))
    print(f"{len(before)} programs before; {len(different)} differ")
    print("".join(f"  {name}\n" for name in different), end="")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
