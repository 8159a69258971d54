"""Four H100 that this machine does not have, and programs compiled for them.

`h100.txtpb` is what a real one says of itself:
`jax._src.lib.xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

import functools
import importlib.util
import pathlib
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

PLUGIN = next((p for p in ("jax_cuda13_plugin", "jax_cuda12_plugin") if importlib.util.find_spec(p)), None)

# Fields that jax 0.10 does not know.
NEWER = {
    "mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
}  # fmt: skip


@functools.cache
def devices():
    config = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()
    if jax.__version_info__ < (0, 11):
        config = "".join(line for line in config.splitlines(True) if line.split(":")[0].strip() not in NEWER)
    return topologies.get_topology_desc(
        topology_name="h100", platform="cuda", target_config=config, topology="1x1x4"
    ).devices


def compile_on_one(f, *shapes):
    """jit of f for one GPU; a shape may be None."""
    where = SingleDeviceSharding(devices()[0])
    return _compile(f, jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes))


def compile_on_four(f, *shapes):
    """jit of f on every device of a mesh, each with its row of the arguments [4, ...], for one row of the result."""
    mesh = jax.sharding.Mesh(np.array(devices()), ("tp",), axis_types=(AxisType.Auto,))
    own = lambda *xs: f(*(x[0] for x in xs))[None]
    where = NamedSharding(mesh, P("tp"))
    args = [jax.ShapeDtypeStruct((4, *s.shape), s.dtype, sharding=where) for s in shapes]
    return _compile(jax.shard_map(own, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")), args)


def _compile(f, args):
    return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def spills(ptxas: str) -> list[tuple[int, int, int]]:
    """(stack bytes, spill stores, spill loads) of each kernel that ptxas compiled."""
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas)
    return [tuple(map(int, kernel)) for kernel in found]
