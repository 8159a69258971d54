"""Asks the driver's own library whether this process's GPUs can write into each other's memory over NVLink."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Mapping

_MAX_LINKS = 18
# Boards that may have no NVLink, or only to one neighbour.
_DOUBTFUL = r"PCIe|NVL\b"


def missing(device_kind: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns why peer memory over NVLink is not used here unless it is asked for; None where it is."""
    if environment.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "NCCL_P2P_DISABLE asks for a link without peer memory"
    if environment.get("NCCL_P2P_LEVEL", "").upper() in ("LOC", "0"):
        return f"NCCL_P2P_LEVEL={environment['NCCL_P2P_LEVEL']} asks for a link without peer memory"
    linked = all_linked()
    if linked is False:
        return "a GPU of this machine has no active NVLink"
    if linked is None and re.search(_DOUBTFUL, device_kind):
        return f"a {device_kind} may have no NVLink, and the driver does not say"
    return None


def unfit_memory(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns why peers cannot write into this process's memory at all; None where they can."""
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator in ("", "default", "bfc"):
        return None
    return f"XLA_PYTHON_CLIENT_ALLOCATOR={allocator}: peer memory needs the default one"


@functools.cache
def all_linked() -> bool | None:
    """Returns whether every GPU of this machine has an active NVLink; None where the driver's library does not say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or not count.value:
            return None
        return all(_active(nvml, i) for i in range(count.value))
    except (OSError, AttributeError):
        return None


def _active(nvml: ctypes.CDLL, index: int) -> bool:
    device, state = ctypes.c_void_p(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return False
    links = range(_MAX_LINKS)
    return any(nvml.nvmlDeviceGetNvLinkState(device, n, ctypes.byref(state)) == 0 and state.value for n in links)
