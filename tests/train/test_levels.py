"""Which ranks share a host, and how sdp4 sends between them."""

import dataclasses

import numpy as np
import pytest
from helpers import make_mesh

from taco_jax.collectives import topology
from taco_jax.compression.compression import Compression
from taco_jax.train.data_parallel import gradient_compression


@pytest.mark.parametrize(
    "dp, tp, devices_per_host, ranks",
    [(8, 1, 4, 4), (8, 1, 8, 8), (8, 1, 1, 1), (8, 1, 100, 8), (4, 2, 4, 2), (2, 4, 4, 1), (2, 4, 2, 1), (8, 1, 3, 1),
     (6, 1, 3, 3), (6, 1, 4, 2), (6, 1, 5, 1)],
)  # fmt: skip
def test_ranks_of_a_host(dp, tp, devices_per_host, ranks):
    assert topology.ranks_per_host(make_mesh(dp=dp, tp=tp), "dp", devices_per_host) == ranks


@pytest.mark.parametrize(
    "dp, tp, devices_per_host, axis, ranks",
    [(1, 8, 4, "tp", 4), (2, 4, 4, "tp", 4), (2, 4, 2, "tp", 2), (4, 2, 1, "tp", 1), (1, 8, 3, "tp", 1),
     (2, 4, 4, ("dp", "tp"), 4), (2, 4, 4, ("tp", "dp"), 1), (4, 2, 4, ("dp", "tp"), 4), (2, 4, 8, ("dp", "tp"), 8)],
)  # fmt: skip
def test_ranks_of_a_host_along_any_axis(dp, tp, devices_per_host, axis, ranks):
    assert topology.ranks_per_host(make_mesh(dp=dp, tp=tp), axis, devices_per_host) == ranks


def test_groups():
    assert topology.inside(4).of(8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.between(8, 4).of(8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.between(6, 2).of(6) == [[0, 2, 4], [1, 3, 5]]


@dataclasses.dataclass
class Device:
    process_index: int
    slice_index: int | None = None


@dataclasses.dataclass
class FakeMesh:
    devices: np.ndarray
    axis_names: tuple = ("dp", "pp", "tp")


def test_what_jax_says_of_hosts():
    assert topology.ranks_per_host(make_mesh(dp=8), "dp") == 8
    of = lambda devices: topology.ranks_per_host(FakeMesh(np.array(devices, object).reshape(8, 1, 1)), "dp")
    assert of([Device(i // 4) for i in range(8)]) == 4
    # One process a GPU: the machine counts, not the process.
    assert of([Device(i, i // 2) for i in range(8)]) == 2
    assert of([Device(i % 2) for i in range(8)]) == 1


def test_sdp4_goes_in_levels_where_hosts_have_several_ranks():
    mesh = make_mesh(dp=4, tp=2)
    two = gradient_compression("sdp4", mesh, 4)
    assert two == Compression("int8h", between_hosts="int4h", algorithm="hierarchical", ranks_per_host=2)
    for devices_per_host, codec in ((8, "int8h"), (2, "int4h"), (None, "int8h")):
        assert gradient_compression("sdp4", mesh, devices_per_host) == Compression(codec)
    assert gradient_compression("mxfp8", mesh) == Compression("mxfp8")
