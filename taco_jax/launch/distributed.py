"""Starting JAX on one process of several: who is here, with which devices, and whether all of them can add up.

`--distributed auto|slurm|env|off` chooses the launcher (`taco_jax.launch.launchers`); `run` puts the rest in place
around a program: the rendezvous and the last word (`taco_jax.launch.supervisor`), `jax.distributed`, and a self-test.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from taco_jax.config import ConfigError, TrainConfig, cli
from taco_jax.errors import error_line
from taco_jax.launch import launchers
from taco_jax.launch.launchers import Launch
from taco_jax.launch.supervisor import Reporter, supervise

Result = TypeVar("Result")


def run(config: TrainConfig, work: Callable[[TrainConfig], int]) -> int:
    """Runs `work(config)`, which returns an exit code, as the process that the launcher says this one is.

    Call it before anything starts a backend. One process alone calls `work` and nothing else. Of several, each becomes
    the parent of a worker that is the same command once more.

    Raises ConfigError for a launch that cannot work.
    """
    launch = launchers.find(config.distributed)
    if launch is None:
        return work(config)
    reporter = Reporter.find()
    if reporter is None:
        return supervise(launch, config)
    try:
        start(launch, config, reporter)
        code = work(config)
    except ConfigError as error:
        cli.say(error_line(error), sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
        leave(1)
    if code:
        reporter.own()
        reporter.hush()
        leave(code)
    import jax

    reporter.hush()
    jax.distributed.shutdown()
    return 0


def start(launch: Launch, config: TrainConfig, reporter: Reporter) -> None:
    """Connects JAX's processes and checks that they can compute together; prints what this process holds.

    Raises ConfigError if the mesh leaves devices out, which their processes would then have no part in.
    """
    import jax

    # Its handler would take SIGTERM from ours, and it knows no other signal.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        launch.address,
        launch.processes,
        launch.process,
        local_device_ids=launchers.local_device_ids(launch),
        cluster_detection_method="deactivate",
        # The supervisors are sooner to notice and know better what to say.
        initialization_timeout=config.distributed_timeout + 60,
        heartbeat_timeout_seconds=config.heartbeat_timeout + 60,
    )
    cli.devices(config.devices)
    cli.say(
        f"process {jax.process_index()}/{jax.process_count()} holds {jax.local_device_count()} of "
        f"{jax.device_count()} devices"
    )
    if config.mesh.size != jax.device_count():
        from jax.experimental import multihost_utils

        # All refuse it. The first process serves the others' start, and must not leave before they have their devices.
        with contextlib.suppress(RuntimeError):
            multihost_utils.sync_global_devices("taco_jax mesh")
        raise ConfigError(
            f"mesh: dp {config.mesh.dp} x pp {config.mesh.pp} x tp {config.mesh.tp} is {config.mesh.size} devices, the "
            f"{launch.processes} processes hold {jax.device_count()}, and with several processes all of them take part"
        )
    reporter.stage("joined")
    self_test()
    reporter.stage("ready")


def self_test() -> None:
    """An all-reduce over all devices of all processes: each adds its number plus 1. RuntimeError for a wrong sum."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("all",))
    mine = lambda index: np.full(1, jax.process_index() + 1, np.int32)
    numbers = jax.make_array_from_callback((len(devices),), NamedSharding(mesh, P("all")), mine)
    found = int(jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(numbers))
    expected = sum(device.process_index + 1 for device in devices)
    if found != expected:
        raise RuntimeError(
            f"start-up self-test: the all-reduce over {len(devices)} devices gave {found}, not {expected}"
        )


def first_alone(action: Callable[[], Result], folder: str) -> Result:
    """action() of the first process, and then of the others, which must find `folder` as it left it.

    Raises ConfigError where they do not.
    """
    import jax

    if jax.process_count() == 1:
        return action()
    from jax.experimental import multihost_utils

    result = action() if jax.process_index() == 0 else None
    multihost_utils.sync_global_devices(f"taco_jax {folder}")
    if jax.process_index() == 0:
        return result
    if not Path(folder).is_dir():
        raise ConfigError(
            f"workdir={folder}: process 0 made it, but process {jax.process_index()} (host {socket.gethostname()}) "
            f"does not see it; use a folder on a file system that all hosts share"
        )
    return action()


def leave(code: int) -> NoReturn:
    """Ends this process without JAX's farewell, in which it would wait for the others."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
