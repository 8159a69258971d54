"""When NVLink is taken without being asked for."""

import pytest

from pallas_kernels.nvlink import hardware

SXM, PCIE = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"


@pytest.mark.parametrize(
    "kind, linked, environment, reason",
    [
        (SXM, True, {}, None),
        (SXM, None, {}, None),
        (PCIE, True, {}, None),
        (PCIE, None, {}, "may have no NVLink"),
        ("NVIDIA H100 NVL", None, {}, "may have no NVLink"),
        (SXM, False, {}, "no active NVLink"),
        (SXM, True, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE asks for"),
        (SXM, True, {"NCCL_P2P_DISABLE": "0"}, None),
        (SXM, True, {"NCCL_P2P_LEVEL": "LOC"}, "NCCL_P2P_LEVEL=LOC asks for"),
        (SXM, True, {"NCCL_P2P_LEVEL": "NVL"}, None),
    ],
)
def test_missing(kind, linked, environment, reason, monkeypatch):
    monkeypatch.setattr(hardware, "all_linked", lambda: linked)
    found = hardware.missing(kind, environment)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("allocator, fits", [("", True), ("default", True), ("BFC", True), ("platform", False)])
def test_memory_that_peers_can_write_to(allocator, fits):
    found = hardware.unfit_memory({"XLA_PYTHON_CLIENT_ALLOCATOR": allocator})
    assert found is None if fits else "needs the default one" in found
    assert hardware.unfit_memory({}) is None


def test_the_driver_is_asked():
    assert hardware.all_linked() in (True, False, None)
