"""How this process was started, and beside which others: the variables that launchers set.

| `--distributed` | taken from |
|---|---|
| `env` | JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES, JAX_PROCESS_ID; or torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE, RANK and, where set, LOCAL_RANK and LOCAL_WORLD_SIZE |
| `slurm` | SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_PROCID, SLURM_LOCALID, which `srun` sets |
| `auto` | the first that is complete: JAX_*, torchrun's, SLURM's; else one process |
| `off` | nothing: one process |

Two ports of the coordinator's host are used, one for JAX and the next one for `taco_jax.launch.rendezvous`. SLURM's jobs derive
them from the job's number; JAX_COORDINATOR_ADDRESS names the first; torchrun itself listens on MASTER_PORT, so the two
after it are taken. JAX_LOCAL_DEVICE_IDS (jax's own) says which of a host's devices a process takes.
"""  # noqa: E501 (a table)

from __future__ import annotations

import dataclasses
import glob
import ipaddress
import os
import re
import socket
from collections.abc import Mapping

from taco_jax.config import ConfigError

JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
# SLURM's jobs share these ports, which are Linux' last ephemeral ones and a little used part of them.
FIRST_PORT, PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class Launch:
    """One process among several.

    launcher: what it was recognised by. host, port: where process 0 serves the others. process, processes: which one of
    how many. hosts: machines, None where the launcher does not say. local, locals: which one of how many on its host.
    own_devices: the launcher gave every process devices of its own, so that none of the visible ones are others'.
    """

    launcher: str
    host: str
    port: int
    process: int
    processes: int
    hosts: int | None = None
    local: int = 0
    locals: int = 1
    own_devices: bool = False

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def name(self) -> str:
        return f"process {self.process} of {self.processes}"


def find(distributed: str, environment: Mapping[str, str] | None = None) -> Launch | None:
    """The launch that a `distributed` value and the environment describe; None for one process alone.

    Raises ConfigError for variables that are missing or make no sense, and for a coordinator whose address is the
    loopback's although there are several hosts: the others would look for it on themselves.
    """
    env = os.environ if environment is None else environment
    launch = None
    if distributed == "env" or (distributed == "auto" and any(name in env for name in JAX[1:])):
        launch = _from_env(env, distributed)
    elif distributed == "auto" and all(name in env for name in TORCHRUN):
        launch = _from_torchrun(env, distributed)
    elif distributed == "slurm" or (distributed == "auto" and all(name in env for name in SLURM)):
        launch = _from_slurm(env, distributed)
    if launch is None:
        return None
    if not 0 <= launch.process < launch.processes:
        raise ConfigError(
            f"distributed={distributed!r}: {launch.launcher} says process {launch.process} of {launch.processes}; "
            f"processes are numbered from 0 to {launch.processes - 1}"
        )
    if launch.processes == 1:
        return None
    if (launch.hosts or 1) > 1 and _is_loopback(launch.host):
        raise ConfigError(
            f"distributed={distributed!r}: the coordinator {launch.host} resolves to a loopback address, but "
            f"{launch.launcher} reports {launch.hosts} hosts, which would look for it on themselves; set "
            f"JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID with an address that all of them reach, or "
            f"repair the host's entry in /etc/hosts"
        )
    return launch


def local_device_ids(launch: Launch, environment: Mapping[str, str] | None = None) -> list[int] | None:
    """The visible GPUs that a process takes where several share a host; None: all that it sees.

    Raises ConfigError where the processes of a host cannot share its GPUs evenly.
    """
    env = os.environ if environment is None else environment
    if launch.locals == 1 or launch.own_devices or env.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = env.get("CUDA_VISIBLE_DEVICES")
    gpus = len([v for v in visible.split(",") if v]) if visible is not None else len(glob.glob("/dev/nvidia[0-9]*"))
    if gpus < launch.locals:
        return None  # each sees its own
    if gpus % launch.locals:
        raise ConfigError(
            f"{launch.launcher}: {launch.locals} processes of a host cannot share its {gpus} GPUs evenly; start one "
            f"process a host, or set JAX_LOCAL_DEVICE_IDS or CUDA_VISIBLE_DEVICES for each"
        )
    each = gpus // launch.locals
    return list(range(launch.local * each, (launch.local + 1) * each))


def _from_env(env: Mapping[str, str], distributed: str) -> Launch:
    if distributed == "env" and not any(name in env for name in JAX[1:]) and any(name in env for name in TORCHRUN):
        return _from_torchrun(env, distributed)
    _require(env, JAX, distributed, "the variables of --distributed env")
    host, _, port = env[JAX[0]].rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{JAX[0]}={env[JAX[0]]!r}: must be host:port, such as node001:12345")
    return Launch(
        "the environment (JAX_*)",
        host.strip("[]"),
        _port(int(port), JAX[0]),
        _number(env, JAX[2]),
        _number(env, JAX[1]),
    )


def _from_torchrun(env: Mapping[str, str], distributed: str) -> Launch:
    _require(env, TORCHRUN, distributed, "torchrun's variables")
    world = _number(env, "WORLD_SIZE")
    locals_ = _number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
    return Launch(
        "the environment (torchrun)",
        env["MASTER_ADDR"],
        _port(_number(env, "MASTER_PORT") + 1, "MASTER_PORT"),
        _number(env, "RANK"),
        world,
        hosts=-(-world // max(locals_, 1)) if "LOCAL_WORLD_SIZE" in env else None,
        local=_number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else 0,
        locals=locals_,
    )


def _from_slurm(env: Mapping[str, str], distributed: str) -> Launch:
    _require(env, SLURM, distributed, "the variables that srun sets")
    job = _number(env, "SLURM_JOB_ID") + 7 * int(env.get("SLURM_STEP_ID", "0") if _digits(env, "SLURM_STEP_ID") else 0)
    nodes, tasks = _number(env, "SLURM_STEP_NUM_NODES"), _number(env, "SLURM_STEP_NUM_TASKS")
    return Launch(
        "SLURM",
        first_host(env["SLURM_STEP_NODELIST"]),
        FIRST_PORT + 2 * job % PORTS,
        _number(env, "SLURM_PROCID"),
        tasks,
        hosts=nodes,
        local=_number(env, "SLURM_LOCALID"),
        locals=max(1, -(-tasks // max(nodes, 1))),
        own_devices="SLURM_GPUS_PER_TASK" in env,
    )


def first_host(node_list: str) -> str:
    """The first host of SLURM's compressed list: "gpu[003-010,020],cpu1" -> "gpu003"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", node_list)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _require(env: Mapping[str, str], names: tuple[str, ...], distributed: str, what: str) -> None:
    missing = [name for name in names if not env.get(name)]
    if missing:
        raise ConfigError(
            f"distributed={distributed!r}: {', '.join(missing)} not set ({what} are {', '.join(names)}); set them, or "
            f"use --distributed off for one process"
        )


def _digits(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").isdigit()


def _number(env: Mapping[str, str], name: str) -> int:
    if not _digits(env, name):
        raise ConfigError(f"{name}={env[name]!r}: must be a whole number, such as 0")
    return int(env[name])


def _port(port: int, name: str) -> int:
    # The next one is used too.
    if not 0 < port < 65535:
        raise ConfigError(f"{name}: ports {port} and {port + 1} must be from 1 to 65535; try 12345")
    return port


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False  # not known yet, as with pods that start one by one: the rendezvous tries again
    return any(ipaddress.ip_address(address[4][0].partition("%")[0]).is_loopback for address in found)
