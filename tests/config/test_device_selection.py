"""The value of --devices: parsed, and set before a backend starts."""

import os
import sys

import pytest

from taco_jax.config import (
    ConfigError,
    cli,
    parse_devices,
)


def test_parse_devices():
    assert parse_devices("cpu:8") == ("cpu", 8)
    assert parse_devices("cpu") == ("cpu", None)
    assert parse_devices("gpu") == parse_devices("cuda") == ("cuda", None)
    assert parse_devices(None) == (None, None)
    with pytest.raises(ConfigError, match="devices='cpu:9999999': at most 4096 devices are emulated; try 'cpu:8'"):
        parse_devices("cpu:9999999")


@pytest.mark.parametrize(
    "before, after",
    [
        (None, ["--xla_force_host_platform_device_count=3", "--xla_cpu_collective_call_terminate_timeout_seconds=600"]),
        (
            "--xla_cpu_collective_call_terminate_timeout_seconds=50 --xla_force_host_platform_device_count=2",
            ["--xla_cpu_collective_call_terminate_timeout_seconds=50", "--xla_force_host_platform_device_count=3"],
        ),
    ],
)
def test_devices_are_chosen_before_the_backend_starts(run_python, before, after):
    """Also when jax is imported already; other flags of the user stay."""
    code = """
import os, jax
from taco_jax.config import cli
cli.select_devices("cpu:3", deterministic=True)
print(len(jax.devices()), jax.devices()[0].platform, os.environ["XLA_FLAGS"])
"""
    out = run_python(code, devices=None, env={"XLA_FLAGS": before}).stdout.split()
    assert out == ["3", "cpu", *after, "--xla_gpu_deterministic_ops=true"]


@pytest.mark.parametrize(
    "disabled, before, after",
    [
        ("1", "", "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"),
        ("1", "--xla_gpu_experimental_use_collective_kernels=ALL_REDUCE", None),
        ("1", "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=true", None),
        ("0", "", None),
        (None, "--xla_gpu_deterministic_ops=true", None),
    ],
)
def test_exact_sums_stay_out_of_peer_memory_where_that_is_disabled(disabled, before, after, monkeypatch):
    """XLA's own kernels do not ask NCCL's settings. What the user says of them stays."""
    monkeypatch.setenv("XLA_FLAGS", before)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    if disabled is not None:
        monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    cli.select_devices(None)
    assert os.environ["XLA_FLAGS"] == (before if after is None else after)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
@pytest.mark.parametrize(
    "env, keeps",
    [({}, True), pytest.param({"MALLOC_TOP_PAD_": "131072"}, False, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_emulated_devices_keep_the_memory_of_a_step(run_python, env, keeps):
    """64 MB that every call takes and frees are not cleared by the kernel each time, unless the user has set malloc."""
    code = """
import resource
from taco_jax.config import cli
cli.select_devices("cpu:2")
import jax, jax.numpy as jnp
double, x = jax.jit(lambda x: x * 2), jnp.ones(1 << 24)
for call in range(60):  # the first ones find holes between what stays
    if call == 40:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(double(x))
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() >> 20)
"""
    cleared = int(run_python(code, devices=None, env=env).stdout)
    assert cleared <= 256 if keeps else cleared >= 1024, f"{cleared} MB of new pages for 20 calls"
