"""`pallas_kernels.choose`: the name, the reason, forced backends, and the package's independence of taco_jax."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import BACKENDS, OPERATIONS, KernelSpec, KernelUnavailableError, choose

TACO = KernelSpec("encode", "taco", "e4m3", 128, "hadamard", "ue5m3", "bfloat16", 1 << 20)


def device(platform="gpu", kind="NVIDIA H100 80GB HBM3", capability="9.0"):
    return SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


HOPPER = device()
AMPERE = device(kind="NVIDIA A100-SXM4-80GB", capability="8.0")
DEVICES = {
    "cpu": (SimpleNamespace(platform="cpu", device_kind="cpu"), "CPU has no kernels: the jnp reference runs"),
    "hopper": (HOPPER, "mosaic kernels are not built yet"),
    "blackwell": (device(kind="NVIDIA B200", capability="10.0"), "mosaic kernels are not built yet"),
    "ada": (device(kind="NVIDIA L4", capability="8.9"), "triton kernels are not built yet"),
    "ampere": (AMPERE, "triton kernels are not built yet"),
    "volta": (device(kind="Tesla V100", capability="7.0"), "older than compute capability 8.0"),
    "amd": (device(kind="AMD Instinct MI300X", capability="gfx942"), "no NVIDIA GPU"),
    "tpu": (SimpleNamespace(platform="tpu", device_kind="TPU v5e"), "platform 'tpu' has no kernels"),
}


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_choose_answers_jnp_and_names_what_is_missing(name, operation):
    target, reason = DEVICES[name]
    answer = choose(dataclasses.replace(TACO, operation=operation), target)
    assert answer[0] == "jnp"
    assert reason in answer[1]


def test_choose_on_the_device_of_this_machine():
    name, reason = choose(TACO, jax.devices()[0])
    assert name == "jnp"
    assert reason


@pytest.mark.parametrize("codec, reason", [("none", "nothing to encode"), ("taco_paper", "no kernel by design")])
def test_codecs_that_stay_with_jnp(codec, reason):
    name, given = choose(dataclasses.replace(TACO, codec_name=codec), HOPPER)
    assert name == "jnp"
    assert reason in given


@pytest.mark.parametrize(
    "force, target, reason",
    [
        ("mosaic", HOPPER, "mosaic kernels are not built yet"),
        ("triton", HOPPER, "takes mosaic kernels, not triton"),
        ("triton", AMPERE, "triton kernels are not built yet"),
        ("mosaic", AMPERE, "takes triton kernels, not mosaic"),
        ("mosaic", DEVICES["cpu"][0], "CPU has no kernels"),
    ],
)
def test_a_forced_backend_that_cannot_run_raises_with_the_reason(force, target, reason):
    with pytest.raises(KernelUnavailableError, match=reason) as caught:
        choose(TACO, target, force=force)
    assert "'jnp'" in str(caught.value)  # what would work


@pytest.mark.parametrize("name", DEVICES)
def test_jnp_can_be_forced_everywhere(name):
    assert choose(TACO, DEVICES[name][0], force="jnp") == ("jnp", "jnp was asked for")


def test_unknown_names_are_errors_that_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'mosaic'"):
        choose(TACO, HOPPER, force="mosiac")
    with pytest.raises(ValueError, match="did you mean 'encode'"):
        dataclasses.replace(TACO, operation="encod")
    with pytest.raises(ValueError, match="block=0"):
        dataclasses.replace(TACO, block=0)
    with pytest.raises(ValueError, match="elements=-1"):
        dataclasses.replace(TACO, elements=-1)


def test_spec_is_hashable_and_backends_are_what_choose_accepts():
    assert hash(TACO) == hash(dataclasses.replace(TACO))
    assert BACKENDS[0] == "jnp"


def test_the_package_imports_nothing_from_taco_jax(run_python):
    run_python("import sys, pallas_kernels; assert not [m for m in sys.modules if m.startswith('taco_jax')]")
