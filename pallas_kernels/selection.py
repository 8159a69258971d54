"""Which implementation runs a codec operation on a device, and why: `choose(spec, device) -> (name, reason)`."""

import difflib
import re
from dataclasses import dataclass
from typing import Any

BACKENDS = ("jnp", "mosaic", "triton")
OPERATIONS = ("encode", "reduce", "decode")

# Codecs that stay with the jnp reference on every device.
JNP_ONLY = {
    "none": "codec 'none' sends the values as they are: there is nothing to encode",
    "taco_paper": "codec 'taco_paper' is the paper to the letter, kept as a reference: it has no kernel by design",
}

# Backend -> what is missing from it. A backend whose kernels are built leaves this table.
NOT_BUILT = {
    "mosaic": "mosaic kernels are not built yet",
    "triton": "triton kernels are not built yet",
}


class KernelUnavailableError(RuntimeError):
    """A backend was forced that cannot run this operation on this device."""


@dataclass(frozen=True)
class KernelSpec:
    """One codec operation, as far as the choice of a kernel depends on it. Hashable; holds no array.

    `encode` turns x into a wire; `reduce` decodes the P-1 wires of the peers, adds the own chunk in f32 and encodes the
    sum again; `decode` turns a wire into x. `elements` counts the elements of x on one device (`reduce`: of one chunk).
    """

    operation: str  # one of OPERATIONS
    codec_name: str  # preset name, or any label for a codec that is not a preset
    element: str  # "e4m3", "int8", "e2m1", ...
    block: int  # elements that share one scale
    rotation: str  # "none", "hadamard", "signed_hadamard"
    scale: str  # "ue5m3", "bfloat16", "e8m0", "float32", "site"
    dtype: str  # dtype of x: "bfloat16", "float16", "float32"
    elements: int

    def __post_init__(self):
        if self.operation not in OPERATIONS:
            hint = _did_you_mean(self.operation, OPERATIONS)
            raise ValueError(f"KernelSpec.operation={self.operation!r} is unknown; {hint}")
        if self.block < 1:
            raise ValueError(f"KernelSpec.block={self.block} must be at least 1; the presets use 32, 128 and 256")
        if self.elements < 0:
            raise ValueError(f"KernelSpec.elements={self.elements} must not be negative")


def choose(spec: KernelSpec, device: Any, *, force: str | None = None) -> tuple[str, str]:
    """The backend that runs `spec` on `device`, and the reason in one sentence.

    Args:
        spec: the operation.
        device: a `jax.Device`, or anything with its `platform`, `device_kind` and (NVIDIA) `compute_capability`.
        force: a name of BACKENDS to take or to fail, None to choose.
    Returns:
        (name, reason); name is in BACKENDS. Today it is always "jnp", and the reason names what is missing.
    Raises:
        ValueError: `force` is not in BACKENDS.
        KernelUnavailableError: the forced backend cannot run `spec` on `device`; the message says why.

    Starts no backend and allocates nothing: it only reads attributes of `device`.
    """
    if force is not None and force not in BACKENDS:
        raise ValueError(f"backend {force!r} is unknown; {_did_you_mean(force, BACKENDS)}")
    if force == "jnp":
        return "jnp", "jnp was asked for"
    if force is not None:
        obstacle = _obstacle(force, spec, device)
        if obstacle is not None:
            raise KernelUnavailableError(
                f"backend {force!r} cannot {spec.operation} codec {spec.codec_name!r} on {_describe(device)}: "
                f"{obstacle}; use backend None or 'jnp'"
            )
        return force, f"{force} was asked for"
    kernel, reason = _native(device)
    if kernel is None:
        return "jnp", reason
    obstacle = _obstacle(kernel, spec, device)
    if obstacle is not None:
        return "jnp", obstacle
    return kernel, reason


def _native(device: Any) -> tuple[str | None, str]:
    """The kernel backend made for this kind of device (None: there is none), and the reason."""
    if device.platform == "cpu":
        return None, "CPU has no kernels: the jnp reference runs"
    if device.platform not in ("gpu", "cuda"):
        return None, f"platform {device.platform!r} has no kernels: the jnp reference runs"
    capability = _compute_capability(device)
    if capability is None:
        return None, f"{_describe(device)} is no NVIDIA GPU: the jnp reference runs"
    if capability >= (9, 0):
        return "mosaic", f"{_describe(device)} runs mosaic kernels"
    if capability >= (8, 0):
        return "triton", f"{_describe(device)} runs triton kernels"
    return None, f"{_describe(device)} is older than compute capability 8.0: the jnp reference runs"


def _obstacle(backend: str, spec: KernelSpec, device: Any) -> str | None:
    """Why `backend` cannot run `spec` on `device`; None if it can."""
    native, reason = _native(device)
    if native is None:
        return reason
    if native != backend:
        return f"{_describe(device)} takes {native} kernels, not {backend}"
    if spec.codec_name in JNP_ONLY:
        return JNP_ONLY[spec.codec_name]
    return NOT_BUILT.get(backend)


def _compute_capability(device: Any) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA GPU; None for others (AMD reports a name such as gfx942)."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else None


def _describe(device: Any) -> str:
    kind = getattr(device, "device_kind", device.platform)
    capability = _compute_capability(device)
    return f"{kind} (compute capability {capability[0]}.{capability[1]})" if capability else str(kind)


def _did_you_mean(name: Any, valid: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(str(name), valid, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + "valid: " + ", ".join(valid)
