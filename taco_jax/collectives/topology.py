"""Which ranks of a mesh axis share a host, and the groups of ranks that exchange messages inside hosts and between.

A host is what JAX says of the devices (of several processes the machine, however many of them it runs; where JAX does
not know machines, the process), or so many consecutive devices of the mesh. The ranks of a host are consecutive on the
axis: rank r is rank r % local of host r // local, and ranks of different hosts that exchange messages have the same
r % local.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from taco_jax.collectives.manual_region import AxisName, axis_tuple


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks of an axis that exchange messages: `size` of them, `stride` apart."""

    size: int
    stride: int = 1

    def of(self, ranks: int) -> list[list[int]]:
        """All groups of an axis of so many ranks, as `axis_index_groups` takes them."""
        span = self.size * self.stride
        firsts = [first + r for first in range(0, ranks, span) for r in range(self.stride)]
        return [list(range(first, first + span, self.stride)) for first in firsts]


def inside(local: int) -> Group:
    """The ranks of one host."""
    return Group(local)


def between(ranks: int, local: int) -> Group:
    """One rank of every host."""
    return Group(ranks // local, local)


def ranks_per_host(mesh: Mesh, axis: AxisName, devices_per_host: int | None = None) -> int:
    """The most consecutive ranks along `axis` that share a host, whatever the rank along the other axes.

    devices_per_host: consecutive devices of the mesh that count as one host; None: as JAX says.
    """
    devices = mesh.devices
    if devices_per_host is None:
        hosts = np.array([_host(device) for device in devices.flat])
    else:
        hosts = np.arange(devices.size) // devices_per_host
    names = axis_tuple(axis)
    at = [mesh.axis_names.index(name) for name in names]
    hosts = np.moveaxis(hosts.reshape(devices.shape), at, range(len(at)))
    ranks = math.prod(hosts.shape[: len(at)])
    for local in range(ranks, 0, -1):
        if ranks % local == 0:
            groups = hosts.reshape(ranks // local, local, -1)
            if (groups == groups[:, :1]).all():
                return local
    raise AssertionError("one rank shares a host with itself")


def ranks_per_host_here(axis: AxisName) -> int:
    """`ranks_per_host` in a manual region, as if its mesh, which is abstract there, were of `jax.devices()` in their
    order; all ranks of the axis where it cannot be. A wrong guess costs time and changes no sum but by rounding."""
    abstract, devices = jax.sharding.get_abstract_mesh(), jax.devices()
    if abstract.size != len(devices) or len({_host(device) for device in devices}) == 1:
        return lax.axis_size(axis)
    sizes = tuple(abstract.shape.values())
    return ranks_per_host(Mesh(np.array(devices).reshape(sizes), abstract.axis_names), axis)


def _host(device) -> int:
    number = getattr(device, "slice_index", None)
    return device.process_index if number is None else number
