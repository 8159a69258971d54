"""What a device is, as far as the choice of kernels depends on it: its compute capability, or that it has none.

A `jax.Device` says its compute capability; an abstract device (of a mesh that a function is traced for, with or
without that hardware in the machine) has only its name, so names of GPUs are known here.
"""

import re
from typing import Any

import jax

# The first pattern that is in the name counts, so longer names come first.
_NAMES = (
    (r"\bT4\b|RTX 20\d\d|Quadro RTX", (7, 5)),
    (r"GB10\b", (12, 1)),
    (r"GB300|B300", (10, 3)),
    (r"GB200|B200|B100", (10, 0)),
    (r"GH200|H[128]00|H20Z?\b", (9, 0)),
    (r"RTX PRO \d+ Blackwell|RTX 50\d\d", (12, 0)),
    (r"\bThor\b", (11, 0)),  # 10.1 before CUDA 13
    (r"\bOrin\b", (8, 7)),
    (r"RTX \d+ Ada|RTX 40\d\d|\bL(4|20|40S?)\b", (8, 9)),
    (r"RTX A\d+|RTX 30\d\d|\bA(2|10G?|16|40)\b|\bA6000\b", (8, 6)),
    (r"\bA(30X?|100X?|800)\b", (8, 0)),
    (r"\bV100\b|Titan V", (7, 0)),
)


def compute_capability(device: Any) -> tuple[int, int] | None:
    """(major, minor) of an NVIDIA GPU; None for others (AMD reports a name such as gfx942) and for unknown names."""
    reported = getattr(device, "compute_capability", None)
    if reported is None:
        name = str(getattr(device, "device_kind", ""))
        return next((found for pattern, found in _NAMES if re.search(pattern, name, re.IGNORECASE)), None)
    match = re.fullmatch(r"(\d+)\.(\d+)", str(reported))
    return (int(match[1]), int(match[2])) if match else None


def describe(device: Any) -> str:
    """The device's name, with its compute capability where it has one."""
    kind = getattr(device, "device_kind", device.platform)
    capability = compute_capability(device)
    return f"{kind} (compute capability {capability[0]}.{capability[1]})" if capability else str(kind)


def region_device():
    """The device that is traced for: that of the region's mesh, or the first one where there is none.

    A mesh knows its devices by kind only (an abstract device), which may be another machine's; where this machine has
    one of that kind it is returned, because it says more.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    devices = jax.local_devices()
    if abstract is None:
        return devices[0]
    same = [d for d in devices if (d.platform, d.device_kind) == (abstract.platform, abstract.device_kind)]
    return same[0] if same else abstract
