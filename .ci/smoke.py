"""The smoke test of an installed taco_jax: `python .ci/smoke.py experiments/quickstart.py`, outside of the checkout."""

import os
import pathlib
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import taco_jax
from taco_jax.compression.chains import CHAIN_OPTIONS


def relative_error(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


print("python", sys.version.split()[0], "jax", jax.__version__, "taco_jax from", taco_jax.__file__)
assert "site-packages" in taco_jax.__file__, "the smoke must see the installed package"

# XLA says nothing of a table that is not there.
assert pathlib.Path(CHAIN_OPTIONS["xla_gpu_experimental_collective_perf_table_path"]).is_file()

x = jax.random.normal(jax.random.key(0), (8, 4096))
codecs = {name: codec for name, codec in taco_jax.CODECS.items() if name != "none"}
for name, codec in codecs.items():
    wire = codec.encode(x)
    assert wire.dtype == jnp.uint8 and wire.size == codec.of(x.shape).wire_bytes(x.size), name
    error = relative_error(codec.decode(wire, x.shape, x.dtype), x)
    assert error < 0.16, (name, error)
print(len(codecs), "codecs: round trip")

mesh = jax.make_mesh((8,), ("tp",), axis_types=(AxisType.Auto,))
for name in ("taco", "int8h", "none"):
    psum = jax.shard_map(
        lambda x, codec=taco_jax.CODECS[name]: taco_jax.psum(x, "tp", compression=codec),
        mesh=mesh,
        in_specs=PartitionSpec("tp"),
        out_specs=PartitionSpec(),
    )
    for function in (psum, jax.jit(psum)):
        error = relative_error(function(x)[0], x.sum(0))
        assert error < 0.1, (name, error)
print("psum on 8 devices")

folder = pathlib.Path("run")
command = ["-m", "taco_jax.train", "--config", sys.argv[1], "--steps", "2", "--workdir", str(folder)]
subprocess.run([sys.executable, *command], check=True, timeout=600)
assert (folder / "metrics.jsonl").read_text().count("\n") >= 2
print("smoke passed")
