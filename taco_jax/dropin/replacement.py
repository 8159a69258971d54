"""The module that takes a collective's place: one of `taco_jax`'s, compiled for the same local arrays.

The collective is compiled on the program's own devices, in a thread of its own, and the hook records its module at the
stage at which it gets the program's. So it fits: layouts, fusions and kernels are those of that stage. The compilation
is stopped there. One replacement is kept for each operation, shape, groups and codec.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import taco_jax
from taco_jax.collectives import comm_log
from taco_jax.collectives.transport import pack, unpack
from taco_jax.compression.compression import Compression
from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.mesh_axes import Place

PREFIX = "taco_jax_replacement_"


class RecordedError(Exception):
    """Ends a compilation whose module has been recorded."""


class Request(NamedTuple):
    """A collective over `place` of operands of these local shapes; a sum of several is one message.

    dimension: that is scattered, gathered or exchanged. perm: (source, destination) among the ranks of the axes.
    """

    operation: str
    place: Place
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    compression: Compression
    dimension: int = 0
    perm: tuple[tuple[int, int], ...] = ()


class Replacement(NamedTuple):
    """A recorded module, what one device sends by it, and its codec's name ("none" where nothing is compressed)."""

    module: Module
    sent: float
    codec: str


def run(request: Request, *xs):
    """The collective on one device's arrays."""
    axes, compression, dim = request.place.axes, request.compression, request.dimension
    axes = axes[0] if len(axes) == 1 else axes
    (x, *_) = xs
    match request.operation:
        case "all_reduce" if len(xs) > 1:
            block = compression.codecs[0].block
            y = taco_jax.psum(pack([x.reshape(-1) for x in xs], block), axes, compression=compression)
            slices = _slices if request.place.mesh.devices.flat[0].platform == "cpu" else unpack
            return tuple(part.reshape(x.shape) for part, x in zip(slices(y, [x.size for x in xs], block), xs))
        case "all_reduce":
            return taco_jax.psum(x, axes, compression=compression)
        case "reduce_scatter":
            return taco_jax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True, compression=compression)
        case "all_gather":
            return taco_jax.all_gather(x, axes, axis=dim, tiled=True, compression=compression)
        case "all_to_all" if len(xs) > 1:
            return tuple(taco_jax.all_to_all(jnp.stack(xs), axes, 0, 0, compression=compression, tiled=True))
        case "all_to_all":
            return taco_jax.all_to_all(x, axes, dim, dim, compression=compression, tiled=True)
        case "collective_permute":
            return taco_jax.ppermute(x, axes, request.perm, compression=compression)
    raise ValueError(f"operation={request.operation!r}")


def _slices(packed: jax.Array, lengths: list[int], block: int) -> list[jax.Array]:
    """`unpack` with starts that the compiler does not know.

    XLA on CPU compiles a kernel for each slice, 20 ms and more for each array of a message. So one serves all arrays of
    a shape.
    """
    starts = np.cumsum([0, *(n + -n % block for n in lengths[:-1])])
    starts = lax.optimization_barrier(tuple(jnp.int32(start) for start in starts))
    return [lax.dynamic_slice_in_dim(packed, start, n) for start, n in zip(starts, lengths)]


_numbers = itertools.count()
_known: dict[Request, Replacement] = {}
_known_lock = threading.Lock()
# Module name -> what is recorded of it. A nested compilation has a name that no other has.
_recording: dict[str, list[bytes]] = {}


def record(name: str, serialized: bytes) -> None:
    """Keeps a module that `find` compiles, and ends its compilation. Does nothing with other modules.

    Raises:
      RecordedError: always, where it is one of ours.
    """
    if name in _recording:
        _recording[name].append(serialized)
        raise RecordedError(name)


def find(request: Request) -> Replacement:
    """The replacement of a collective, compiled where it is the first of its kind. Raises what tracing it raises."""
    with _known_lock:
        if request not in _known:
            _known[request] = in_thread(lambda: _compile(request))
        return _known[request]


def forget() -> None:
    """Drops all replacements, for tests of how often they are made."""
    _known.clear()


def in_thread(make):
    """The result of make() in a new thread: a program's own mesh, trace and settings do not reach it there."""
    result: list = []

    def target():
        try:
            result.append((make(), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=target, name="taco_jax_dropin")
    thread.start()
    thread.join()
    ((value, error),) = result
    if error is not None:
        raise error
    return value


def _compile(request: Request) -> Replacement:
    program, operands = _program(request)
    with comm_log.record() as table:
        module = recorded(program, operands, request.place.mesh)
    rows = table.rows()
    codecs = {row.codec for row in rows} - {"none"}
    return Replacement(module, sum(row.bytes for row in rows), "+".join(sorted(codecs)) or "none")


def recorded(program: Callable, operands: Sequence[jax.ShapeDtypeStruct], mesh: Mesh) -> Module:
    """Compiles a function for a mesh's devices up to the stage of the hook. Returns its module at that stage."""
    name = f"{PREFIX}{next(_numbers)}"
    module_name = f"jit_{name}"
    program.__name__ = program.__qualname__ = name
    platform = {"gpu": "cuda"}.get(kind := mesh.devices.flat[0].platform, kind)
    lowered = jax.jit(program).trace(*operands).lower(lowering_platforms=(platform,))
    found = _recording.setdefault(module_name, [])
    try:
        lowered.compile()
    except Exception:
        if not found:
            raise
    finally:
        del _recording[module_name]
    if not found:
        from taco_jax.dropin.compat import MissingHookError

        raise MissingHookError(
            f"the compiler of {platform} ignores transformations of modules: its plugin is older than jax "
            f"{jax.__version__}; install the plugin of that version"
        )
    return Module(found[-1])


def _program(request: Request):
    """(the collective, its abstract operands): device by device, local arrays of the request's shapes."""
    theirs = request.place.mesh
    mesh = automatic(theirs)
    every = P(theirs.axis_names)
    rest = tuple(axis for axis in theirs.axis_names if axis not in request.place.axes)
    out = P(rest) if request.operation == "all_reduce" else every

    def collective(*xs):
        return run(request, *xs)

    local = jax.shard_map(collective, mesh=mesh, in_specs=(every,) * len(request.shapes), out_specs=out)

    def program(*xs):
        return local(*xs)

    return program, local_operands(mesh, [(s, request.dtype) for s in request.shapes])


def automatic(mesh: Mesh) -> Mesh:
    """A program's mesh as ours: its axis types may be Explicit or Manual, ours are all Auto."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def local_operands(mesh: Mesh, arrays: Sequence[tuple[tuple[int, ...], str]]) -> list[jax.ShapeDtypeStruct]:
    """Abstract arrays, cut along their first dim, of which every device has one of these shapes and dtypes."""
    where = NamedSharding(mesh, P(mesh.axis_names))
    wide = lambda shape: (shape[0] * mesh.size, *shape[1:])
    return [jax.ShapeDtypeStruct(wide(s), np.dtype(jnp.dtype(dtype)), sharding=where) for s, dtype in arrays]


def inline(source: Module, into: Computation, before, operands: Sequence[int], op_name: str) -> list:
    """Copies a recorded module's instructions in front of `before`, reading these operands.

    Returns the instructions of its results.

    op_name: of the copies, which else have the metadata of `before`.
    """
    module = into.module
    entry = source.entry
    new_id = {entry.parameters[n]: operand for n, operand in enumerate(operands)}
    called: dict[int, int] = {}
    metadata = type(before.metadata)()
    metadata.CopyFrom(before.metadata)
    metadata.op_name = op_name
    copies = []
    for instruction in entry.proto.instructions:
        if instruction.opcode == "parameter":
            continue
        copy = into.add(before, instruction)
        new_id[instruction.id] = copy.id
        copy.name = module.fresh_name(instruction.name)
        copies.append(copy)
    for copy in copies:
        copy.operand_ids[:] = [new_id[i] for i in copy.operand_ids]
        if copy.control_predecessor_ids:
            copy.control_predecessor_ids[:] = [new_id[i] for i in copy.control_predecessor_ids]
        _move(copy, metadata, source, into, called)
    root = into.instructions[new_id[entry.proto.root_id]]
    if root.opcode != "tuple":
        return [root]
    results = [into.instructions[i] for i in root.operand_ids]
    into.delete(root)
    return results


def _move(copy, metadata, source: Module, into: Computation, called: dict[int, int]) -> None:
    """Gives a copied instruction its metadata, a fresh channel and copies of what it calls."""
    module = into.module
    copy.metadata.CopyFrom(metadata)
    if copy.channel_id > 0:
        copy.channel_id = module.fresh_channel()
    for n, old in enumerate(copy.called_computation_ids):
        if old not in called:
            computation = module.add_computation(source.computation(old).proto, into)
            called[old] = computation.id
            for inner in computation.instructions:
                _move(inner, metadata, source, into, called)
        copy.called_computation_ids[n] = called[old]
