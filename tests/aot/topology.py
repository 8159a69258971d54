"""H100s that this machine does not have, four where no test says otherwise, and programs compiled for them.

`h100.txtpb` is what a real one says of itself:
`jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

import functools
import importlib.util
import math
import pathlib
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

PLUGIN = next((p for p in ("jax_cuda13_plugin", "jax_cuda12_plugin") if importlib.util.find_spec(p)), None)
# The kernels are fitted to jax 0.11 with the ptxas of CUDA 13.0, to the last register; another release may need a few
# more.
FITTED = jax.__version_info__[:2] == (0, 11) and PLUGIN == "jax_cuda13_plugin"

# Fields that jax 0.10 does not know.
NEWER = {
    "mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
}  # fmt: skip


@functools.cache
def devices(count: int = 4):
    """So many GPUs of one host."""
    config = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()
    if jax.__version_info__ < (0, 11):
        config = "".join(line for line in config.splitlines(True) if line.split(":")[0].strip() not in NEWER)
    return topologies.get_topology_desc(
        topology_name="h100", platform="cuda", target_config=config, topology=f"1x1x{count}"
    ).devices


def compile_on_one(f, *shapes):
    """jit of f for one GPU; a shape may be None."""
    where = SingleDeviceSharding(devices()[0])
    return _compile(f, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes))


def compile_on_four(f, *shapes):
    """jit of f on every device of a mesh, each with its row of the arguments [4, ...], for one row of the result."""
    return compile_on_mesh(f, *shapes)


def compile_on_mesh(f, *shapes, **axes: int):
    """`compile_on_four` on a mesh of these axes, by default tp=4; the first axis of arguments counts its devices."""
    axes = axes or {"tp": 4}
    count, names = math.prod(axes.values()), tuple(axes)
    grid = np.array(devices(count)).reshape(tuple(axes.values()))
    mesh = jax.sharding.Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    own = lambda *xs: f(*(x[0] for x in xs))[None]
    where = NamedSharding(mesh, P(names))
    args = [jax.ShapeDtypeStruct((count, *s.shape), s.dtype, sharding=where) for s in shapes]
    return _compile(jax.shard_map(own, mesh=mesh, in_specs=P(names), out_specs=P(names)), args)


def compile_partly(f, shape, **axes: int):
    """f of an array in a region that is manual over the last axis only, whose rows are split over the others."""
    count, names = math.prod(axes.values()), tuple(axes)
    grid = np.array(devices(count)).reshape(tuple(axes.values()))
    mesh = jax.sharding.Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
    args = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, P(names[:-1], names[-1])))]
    spec = P(None, names[-1])
    return _compile(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={names[-1]}), args)


def _compile(f, args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def spills(ptxas: str) -> list[tuple[int, int, int]]:
    """(stack bytes, spill stores, spill loads) of each kernel that ptxas compiled."""
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    return [tuple(map(int, kernel)) for kernel in found]
