"""`pallas_kernels.choose`: the name, the reason, forced backends, and the package's independence of taco_jax."""

import dataclasses
import importlib.util
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AbstractDevice

from pallas_kernels import (
    BACKENDS,
    OPERATIONS,
    Geometry,
    KernelSpec,
    KernelUnavailableError,
    choose,
    dispatch,
    load,
    nvlink,
)
from pallas_kernels.dispatch import compute_capability

TACO = KernelSpec("encode", "taco", "e4m3", 128, "hadamard", "ue5m3", "bfloat16", 1 << 20)


def device(platform="gpu", kind="NVIDIA H100 80GB HBM3", capability="9.0"):
    return SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
HOPPER = device()
AMPERE = device(kind="NVIDIA A100-SXM4-80GB", capability="8.0")
KERNELS = {
    "hopper": (HOPPER, ("mosaic", "triton")),
    "blackwell": (device(kind="NVIDIA B200", capability="10.0"), ("triton",)),
    "desktop blackwell": (device(kind="NVIDIA GeForce RTX 5090", capability="12.0"), ("triton",)),
    "ada": (device(kind="NVIDIA L4", capability="8.9"), ("triton",)),
    "ampere": (AMPERE, ("triton",)),
}
NO_KERNELS = {
    "cpu": (CPU, "CPU has no kernels: the jnp reference runs"),
    "volta": (device(kind="Tesla V100", capability="7.0"), "older than compute capability 8.0"),
    "thor": (device(kind="NVIDIA Thor", capability="11.0"), "no target of Triton 3.6"),
    "future": (device(kind="NVIDIA X1", capability="13.0"), "no target of Triton 3.6"),
    "amd": (device(kind="AMD Instinct MI300X", capability="gfx942"), "no NVIDIA GPU"),
    "tpu": (SimpleNamespace(platform="tpu", device_kind="TPU v5e"), "platform 'tpu' has no kernels"),
}


@pytest.fixture
def built(monkeypatch):
    """built({backend: why_unsupported's answer}): kernel packages that exist and answer so; the others do not exist."""

    def build(answers, version=(0, 11, 2)):
        find = importlib.util.find_spec
        packages = {f"pallas_kernels.{name}" for name in BACKENDS[1:]}
        there = {f"pallas_kernels.{name}" for name in answers}
        if "triton" in answers:
            there |= {"jax_triton", "triton"}

        def find_spec(name):
            if name not in packages | {"jax_triton", "triton"}:
                return find(name)
            return SimpleNamespace(origin=name) if name in there else None

        asked = []

        def loaded(name):
            return SimpleNamespace(why_unsupported=lambda *args: asked.append((name, *args)) or answers[name])

        monkeypatch.setattr(dispatch.importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(dispatch, "load", loaded)
        monkeypatch.setattr(jax, "__version_info__", version)
        return asked

    return build


@pytest.mark.parametrize("name", NO_KERNELS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_devices_without_kernels(name, operation):
    target, reason = NO_KERNELS[name]
    answer = choose(dataclasses.replace(TACO, operation=operation), target)
    assert answer[0] == "jnp" and reason in answer[1]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_best_backend_that_can(name, operation, built):
    target, order = KERNELS[name]
    spec = dataclasses.replace(TACO, operation=operation)
    built({"mosaic": None, "triton": None})
    chosen, reason = choose(spec, target)
    assert chosen == order[0] and f"runs {chosen} kernels" in reason and "compute capability" in reason
    built({"mosaic": "no int3", "triton": None})
    chosen, reason = choose(spec, target)
    assert chosen == "triton" and ("no int3" in reason) == ("mosaic" in order)
    built({"mosaic": "no int3", "triton": "no int2"})
    assert choose(spec, target) == ("jnp", "; ".join({"mosaic": "no int3", "triton": "no int2"}[b] for b in order))
    built({})
    assert choose(spec, target) == ("jnp", "; ".join(f"{b} kernels are not built yet" for b in order))


def test_what_a_kernel_package_is_asked(built):
    asked = built({"mosaic": "no", "triton": "no"})
    geometry = Geometry(1 << 20, 4, 1 << 18)
    choose(TACO, HOPPER)
    choose(dataclasses.replace(TACO, operation="reduce", rounding="stochastic", geometry=geometry), HOPPER)
    fmt = TACO.format
    assert asked[:2] == [("mosaic", fmt, "encode", "bfloat16", 1 << 20), ("triton", fmt, "encode", "bfloat16")]
    stochastic = dataclasses.replace(fmt, rounding="stochastic")
    assert asked[2] == ("mosaic", stochastic, "reduce", "bfloat16", geometry)


@pytest.mark.parametrize("module, package", [("jax_triton", "jax-triton"), ("triton", "triton")])
def test_triton_needs_jax_triton(module, package, built, monkeypatch):
    built({"triton": None}, version=(0, 12, 0))
    assert choose(TACO, AMPERE)[0] == "jnp" and "need jax below 0.12" in choose(TACO, AMPERE)[1]
    built({"triton": None})
    find = dispatch.importlib.util.find_spec
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda n: None if n == module else find(n))
    assert choose(TACO, AMPERE) == ("jnp", f"triton kernels need {package}: pip install 'taco-jax[triton]'")
    with pytest.raises(KernelUnavailableError, match="rotates blocks; use backend 'auto' or 'jnp'"):
        choose(TACO, AMPERE, force="mosaic")  # nor would triton do


def test_another_jax_triton_is_not_called(built, monkeypatch):
    built({"triton": None})
    monkeypatch.setattr(dispatch, "_release", lambda package: "0.4.1")
    reason = "triton kernels need jax-triton 0.3, and 0.4.1 is installed: pip install 'taco-jax[triton]'"
    assert choose(TACO, AMPERE) == ("jnp", reason) and dispatch.missing_package(AMPERE) == reason
    monkeypatch.setattr(dispatch, "_release", lambda package: "0.3.1")
    assert choose(TACO, AMPERE)[0] == "triton" and dispatch.missing_package(AMPERE) is None


def test_choose_on_the_device_of_this_machine():
    name, reason = choose(TACO, jax.devices()[0])
    assert name == "jnp"
    assert reason


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"codec_name": "none", "element": "none"}, "nothing to encode"),
        ({"codec_name": "taco_paper", "scale": "paper"}, "no kernel by design"),
        ({"element": "e2m2"}, "element e2m2 has no kernel"),
        ({"scale": "e5m0"}, "scale e5m0 has no kernel: kernels have scales of whole bytes"),
        ({"element": "e1m2", "block": 16, "scale": "e4m0"}, "scale e4m0 has no kernel"),
        ({"elements": 0}, "no elements"),
        ({"element": "e2m1", "scale": "site"}, "element 'e2m1' has none"),
    ],
)
def test_what_stays_with_jnp(fields, reason, built):
    built({"mosaic": None, "triton": None})
    name, given = choose(dataclasses.replace(TACO, **fields), HOPPER)
    assert name == "jnp" and given.count(reason) == 1


@pytest.mark.parametrize(
    "force, target, answers, reason",
    [
        ("mosaic", HOPPER, {}, "mosaic kernels are not built yet"),
        ("mosaic", HOPPER, {"mosaic": "no block of 8"}, "no block of 8"),
        ("triton", AMPERE, {}, "triton kernels are not built yet"),
        (
            "mosaic",
            AMPERE,
            {"mosaic": None, "triton": None},
            r"9.0, whose matrix instruction \(wgmma\) rotates blocks; triton would do",
        ),
        (
            "mosaic",
            AMPERE,
            {"mosaic": None},
            "mosaic kernels need compute capability 9.0, .* rotates blocks; use backend",
        ),
        ("triton", NO_KERNELS["thor"][0], {"triton": None}, "is no target of Triton 3.6"),
        ("mosaic", CPU, {"mosaic": None}, "CPU has no kernels"),
    ],
)
def test_a_forced_backend_that_cannot_run_raises_with_the_reason(force, target, answers, reason, built):
    built(answers)
    with pytest.raises(KernelUnavailableError, match=reason) as caught:
        choose(TACO, target, force=force)
    assert "'jnp'" in str(caught.value) and "\n" not in str(caught.value)  # what would work
    assert "the jnp reference runs" not in str(caught.value)  # nothing does


def test_a_forced_backend_that_can_run(built):
    built({"mosaic": None, "triton": None})
    for force, target in (("mosaic", HOPPER), ("triton", HOPPER), ("triton", AMPERE)):
        assert choose(TACO, target, force=force) == (force, f"{force} was asked for")


@pytest.mark.parametrize("name", [*NO_KERNELS, *KERNELS])
def test_jnp_can_be_forced_everywhere(name):
    assert choose(TACO, (NO_KERNELS | KERNELS)[name][0], force="jnp") == ("jnp", "jnp was asked for")


def test_unknown_names_are_errors_that_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'mosaic'"):
        choose(TACO, HOPPER, force="mosiac")
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        load("tritn")
    for field, value, near in (
        ("operation", "encod", "encode"),
        ("element", "e4m9", "e4m3"),
        ("rotation", "hadamrd", "hadamard"),
        ("scale", "bf16", "bfloat16"),
        ("rounding", "stochastc", "stochastic"),
    ):
        with pytest.raises(ValueError, match=f"KernelSpec.{field}='{value}' is unknown; did you mean '{near}'"):
            dataclasses.replace(TACO, **{field: value})
    with pytest.raises(ValueError, match="block=0"):
        dataclasses.replace(TACO, block=0)
    with pytest.raises(ValueError, match="elements=-1"):
        dataclasses.replace(TACO, elements=-1)


CAPABILITIES = {
    "NVIDIA H100 80GB HBM3": (9, 0), "NVIDIA H200": (9, 0), "NVIDIA H20": (9, 0), "NVIDIA GH200 480GB": (9, 0),
    "NVIDIA H800": (9, 0), "NVIDIA H100 PCIe": (9, 0), "NVIDIA B200": (10, 0), "NVIDIA B100": (10, 0),
    "NVIDIA GB200": (10, 0), "NVIDIA A100-SXM4-80GB": (8, 0), "NVIDIA A800-SXM4-80GB": (8, 0), "NVIDIA A30": (8, 0),
    "NVIDIA A10": (8, 6), "NVIDIA A10G": (8, 6), "NVIDIA A40": (8, 6), "NVIDIA RTX A6000": (8, 6),
    "NVIDIA GeForce RTX 3090": (8, 6), "NVIDIA L4": (8, 9), "NVIDIA L40": (8, 9), "NVIDIA L40S": (8, 9),
    "NVIDIA GeForce RTX 4090": (8, 9), "NVIDIA RTX 6000 Ada Generation": (8, 9), "Tesla V100-SXM2-16GB": (7, 0),
    "Tesla T4": (7, 5), "NVIDIA GeForce RTX 5090": (12, 0), "NVIDIA GB10": (12, 1), "NVIDIA A100X": (8, 0),
    "NVIDIA A30X": (8, 0), "NVIDIA Thor": (11, 0), "NVIDIA H20Z": (9, 0), "NVIDIA GB300": (10, 3),
    "NVIDIA Orin": (8, 7), "AMD Instinct MI300X": None, "cpu": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", CAPABILITIES)
def test_an_abstract_device_is_known_by_its_name(kind):
    assert compute_capability(AbstractDevice(kind, None, "gpu")) == CAPABILITIES[kind]


@pytest.mark.parametrize("kind", CAPABILITIES)
def test_only_hopper_runs_what_is_compiled_for_hopper(kind, built):
    built({"mosaic": None, "triton": None})
    hopper = CAPABILITIES[kind] == (9, 0)
    reported = ".".join(map(str, CAPABILITIES[kind] or ("gfx942",)))
    for target in (AbstractDevice(kind, 100, "gpu"), device("gpu", kind, reported)):
        assert (choose(TACO, target)[0] == "mosaic") == hopper
        reason = nvlink.why_device_unsupported(target)
        assert hopper or "need compute capability 9.0, not " in reason


def test_spec_is_hashable_and_backends_are_what_choose_accepts():
    assert hash(TACO) == hash(dataclasses.replace(TACO))
    assert BACKENDS[0] == "jnp"


def test_the_package_imports_nothing_from_taco_jax(run_python):
    run_python("import sys, pallas_kernels; assert not [m for m in sys.modules if m.startswith('taco_jax')]")
