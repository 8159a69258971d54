"""What launchers' variables say, and what is refused."""

import re

import pytest

from taco_jax.config import ConfigError, TrainConfig
from taco_jax.config.checks import check
from taco_jax.config.cli import parse
from taco_jax.launch.launchers import find, first_host, local_device_ids

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "29500", "WORLD_SIZE": "4", "RANK": "3",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "5000", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "10.0.0.[3-4]", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
}  # fmt: skip


@pytest.mark.parametrize("distributed", ["env", "auto"])
def test_jax_variables(distributed):
    launch = find(distributed, JAX)
    assert (launch.address, launch.process, launch.processes) == ("10.0.0.1:1234", 3, 4)
    assert (launch.hosts, launch.local, launch.locals) == (None, 0, 1)
    assert find(distributed, JAX | {"JAX_COORDINATOR_ADDRESS": "[fd00::1]:1234"}).address == "[fd00::1]:1234"


@pytest.mark.parametrize("distributed", ["env", "auto"])
def test_torchrun(distributed):
    """torchrun's own store listens on MASTER_PORT."""
    launch = find(distributed, TORCHRUN)
    assert (launch.address, launch.process, launch.processes) == ("10.0.0.2:29501", 3, 4)
    assert (launch.hosts, launch.local, launch.locals) == (2, 1, 2)


@pytest.mark.parametrize("distributed", ["slurm", "auto"])
def test_slurm(distributed):
    launch = find(distributed, SLURM)
    assert launch.host == "10.0.0.3" and (launch.process, launch.processes) == (3, 4)
    assert (launch.hosts, launch.local, launch.locals, launch.own_devices) == (2, 1, 2, False)
    assert find(distributed, SLURM | {"SLURM_GPUS_PER_TASK": "1"}).own_devices
    # Both ports fit, and neither another job's nor another step's are the same.
    ports = [find("slurm", SLURM | {"SLURM_JOB_ID": str(job)}).port for job in range(5000, 7048)]
    assert min(ports) >= 1024 and max(ports) + 1 <= 65535
    assert len({q for p in ports for q in (p, p + 1)}) == 2 * len(ports)
    assert find("slurm", SLURM | {"SLURM_STEP_ID": "1"}).port != ports[0]


def test_auto_prefers_what_was_set_by_hand():
    assert find("auto", JAX | TORCHRUN | SLURM).address == "10.0.0.1:1234"
    assert find("auto", TORCHRUN | SLURM).address == "10.0.0.2:29501"
    assert find("env", TORCHRUN | SLURM).address == "10.0.0.2:29501"
    assert find("slurm", JAX | TORCHRUN | SLURM).host == "10.0.0.3"


def test_one_process():
    assert find("off", JAX | TORCHRUN | SLURM) is None
    assert find("auto", {}) is None
    assert find("env", JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    # A shell of `salloc`, and sbatch's own script, have these but are no step of several tasks.
    assert find("auto", {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    "distributed, env, message",
    [
        ("env", {}, "distributed='env': JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID not set"),
        ("auto", {"JAX_PROCESS_ID": "1"}, "distributed='auto': JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES not set"),
        ("env", {"RANK": "1"}, "distributed='env': MASTER_ADDR, MASTER_PORT, WORLD_SIZE not set (torchrun's"),
        ("slurm", {"SLURM_JOB_ID": "1"}, "SLURM_LOCALID not set (the variables that srun sets are SLURM_JOB_ID,"),
        ("env", JAX | {"JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS='host': must be host:port, such"),
        ("env", JAX | {"JAX_COORDINATOR_ADDRESS": "h:65535"}, "ports 65535 and 65536 must be from 1 to 65535"),
        ("env", JAX | {"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES='four': must be a whole number"),
        ("env", JAX | {"JAX_PROCESS_ID": "4"}, "says process 4 of 4; processes are numbered from 0 to 3"),
        ("auto", TORCHRUN | {"MASTER_ADDR": "127.0.0.1"}, "the coordinator 127.0.0.1 resolves to a loopback address"),
        ("auto", TORCHRUN | {"MASTER_ADDR": "localhost"}, "but the environment (torchrun) reports 2 hosts"),
        ("slurm", SLURM | {"SLURM_STEP_NODELIST": "127.0.1.1,b"}, "but SLURM reports 2 hosts, which would look for it"),
    ],
)
def test_refused(distributed, env, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        find(distributed, env)
    assert "\n" not in str(error.value)


def test_loopback_of_one_host():
    assert find("env", JAX | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234"}).host == "127.0.0.1"
    assert find("auto", TORCHRUN | {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "4"}).hosts == 1


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-015],host2", "node001"),
        ("node[003,007-015],host2", "node003"),
        ("rack[2-3]n[07-12]-ib,x", "rack2n07-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_devices_of_a_process():
    launch = find("slurm", SLURM)
    assert local_device_ids(launch, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == [2, 3]
    assert local_device_ids(launch, {"CUDA_VISIBLE_DEVICES": "5"}) is None
    assert local_device_ids(launch, {"CUDA_VISIBLE_DEVICES": "0,1", "JAX_LOCAL_DEVICE_IDS": "0"}) is None
    assert local_device_ids(find("env", JAX), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}) is None
    own = find("slurm", SLURM | {"SLURM_GPUS_PER_TASK": "2"})
    assert local_device_ids(own, {"CUDA_VISIBLE_DEVICES": "0,1"}) is None
    with pytest.raises(ConfigError, match="SLURM: 2 processes of a host cannot share its 3 GPUs evenly"):
        local_device_ids(launch, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"distributed": "slrum"}, "distributed='slrum': did you mean 'slurm'?"),
        ({"distributed_timeout": 0}, "distributed_timeout=0: must be at least 1"),
        ({"heartbeat_timeout": 0}, "heartbeat_timeout=0: must be at least 1"),
    ],
)
def test_config(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(TrainConfig(**changes))


def test_launch_files_name_settings_that_work(repository):
    """The flags of the sbatch file and of the JobSet; 16 GPUs each."""
    for name in ("train.sbatch", "jobset.yaml"):
        lines = (repository / "experiments" / "launch" / name).read_text().splitlines()
        command = "\n".join(line.partition("# ")[0] for line in lines if not line.lstrip().startswith("#"))
        command = command.partition("taco_jax.train")[2].partition('"$@"')[0].partition(" env:")[0]
        flags = re.findall(r"--[a-z].*?(?=\s+-|\s*\\?\n|$)", command)
        arguments = [part for flag in flags for part in re.split("[ =]", flag.strip())]
        at = arguments.index("--config") + 1
        arguments[at] = str(repository / arguments[at])
        config = check(parse(arguments))
        assert config.mesh.size == 16 and config.checkpoint.enabled and config.distributed in ("slurm", "env"), name
