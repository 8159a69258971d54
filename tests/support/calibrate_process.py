"""One process of a measured run of several: `python calibrate_process.py PORT PROCESS PROCESSES PLAN`. Prints JSON."""

import json
import sys

import jax
from jax.experimental import multihost_utils


def main(port, process, processes, path):
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    import dropin_programs as programs

    import taco_jax

    on = programs.mesh_between_processes()
    args = programs.weights(on)
    f = programs.step(on, out_shardings=jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec()))
    exact = f(*args)
    with taco_jax.calibrated(path, bits=5, codecs=["int4h", "int6h"]) as calibration:
        ours = f(*args)
    programs.check_equal(exact, ours)
    rows = [(row.axis, row.direction, row.calls, row.sent, row.chosen.codec) for row in calibration.rows()]
    figures = [(row.kurtosis, *(option.error for option in row.options)) for row in calibration.rows()]
    if processes > 1:
        multihost_utils.sync_global_devices("the plan is written")
    with taco_jax.compressed(path) as report:
        f(*args)
    codecs = sorted((*s.axes, s.direction, s.codec, s.runs) for s in report.sites)
    print("JSON", json.dumps({"rows": rows, "figures": figures, "codecs": codecs}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
