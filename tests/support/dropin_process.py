"""One process of a run of two, or the only one: `python dropin_process.py PORT PROCESS PROCESSES`. Prints JSON."""

import json
import sys

import jax
import numpy as np


def main(port, process, processes):
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    import dropin_programs as programs

    import taco_jax

    on = programs.mesh_between_processes()
    args = programs.weights(on)
    f = programs.step(on, out_shardings=jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec()))
    with taco_jax.compressed({"tensor": "int8h", "data": "int6h"}, require=0.95) as report:
        ours = f(*args)
    exact = f(*args)
    least, greatest, error = programs.difference(exact, ours)
    found = {
        "least": least, "greatest": greatest, "error": error,
        "sum": [float(np.abs(np.asarray(x, np.float64)).sum()) for x in jax.tree.leaves(ours)],
        "sites": sorted((s.operation, *s.axes, s.direction, s.codec, s.runs) for s in report.sites),
    }  # fmt: skip
    print("JSON", json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
