"""The trainer with the sums over the tensor-parallel ranks left out: the ceiling of what compression can reach.

    python experiments/free_communication.py --config experiments/qwen7b.py --compression.forward none \
        --compression.backward none

Takes the trainer's flags. The program is the exact one, but every psum over tp of 1 MiB and more hands its operand
on: the same matmuls, memory and schedule, and no waiting. The losses it prints mean nothing. (`link_study.py` runs it
for the codec name "free".)
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax.sharding import PartitionSpec as P

from taco_jax import cli, train

LEAST_BYTES = 1 << 20


def psum_primitive():
    """The primitive behind jax.lax.psum in a shard_map that checks varying axes."""
    mesh = jax.sharding.AbstractMesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    body = jax.shard_map(lambda x: jax.lax.psum(x, "tp"), mesh=mesh, in_specs=P("tp"), out_specs=P())
    (outer,) = jax.make_jaxpr(body)(np.zeros(1, np.float32)).eqns
    (inner,) = outer.params["jaxpr"].eqns
    return inner.primitive


def leave_out_sums() -> None:
    """From here on, large psums over tp compile to nothing."""
    primitive = psum_primitive()
    lower = mlir._lowerings[primitive]
    lower = getattr(lower, "rule", lower)

    def rule(context, *operands, axes, **parameters):
        sizes = [aval.size * aval.dtype.itemsize for aval in context.avals_in]
        if tuple(axes) == ("tp",) and min(sizes) >= LEAST_BYTES:
            return operands
        return lower(context, *operands, axes=axes, **parameters)

    mlir.register_lowering(primitive, rule)


def main(args) -> int:
    leave_out_sums()
    # Gradients of sums that are not there need not be finite, and the steps count all the same.
    return train.main([*args, "--max-skipped-in-a-row", str(10**9)])


if __name__ == "__main__":
    sys.exit(cli.run(main))
