"""Which mesh axes a collective goes over: its replica groups, in each of XLA's forms, against the program's meshes."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from taco_jax.dropin.hlo_proto import is_known

OWN_AXIS = "taco_jax_wait"  # of a mesh that is none of the program's
Groups = tuple[tuple[int, ...], ...]


def groups_of(instruction, partitions: int) -> Groups:
    """The groups of partitions that exchange a collective. Without groups all partitions do."""
    for holder in (instruction, instruction.device_list):
        if holder.HasField("mesh_groups"):
            return _as_groups(_of_mesh(holder.mesh_groups))
        if holder.HasField("iota_groups"):
            return _as_groups(_of_iota(holder.iota_groups))
        if holder.replica_groups:
            return tuple(tuple(group.ids) for group in holder.replica_groups)
    return (tuple(range(partitions)),)


def _as_groups(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def _of_iota(iota) -> np.ndarray:
    ids = np.arange(iota.groups * iota.size).reshape(tuple(iota.dims))
    return ids.transpose(tuple(iota.order)).reshape(iota.groups, iota.size)


def _of_mesh(listed) -> np.ndarray:
    """Groups by axes of a mesh, or by parts of them: (before, size) cuts an axis into before x size x the rest."""
    sizes = [axis.size for axis in listed.mesh.axes]
    parts = {axis: [] for axis in range(len(sizes))}
    for ref in listed.axes:
        parts[ref.axis] += [(ref.part.before, ref.part.size)] if ref.HasField("part") else [(1, sizes[ref.axis])]
    shape: list[int] = []
    place: dict[tuple[int, int], int] = {}
    for axis, size in enumerate(sizes):
        done = 1
        for before, part in sorted(parts[axis]):
            shape.append(before // done)
            place[axis, before] = len(shape)
            shape.append(part)
            done = before * part
        shape.append(size // done)
    inner = [place[ref.axis, ref.part.before if ref.HasField("part") else 1] for ref in listed.axes]
    outer = [dim for dim in range(len(shape)) if dim not in inner]
    ids = _mesh_ids(listed.mesh, int(np.prod(sizes)))
    size = int(np.prod([shape[dim] for dim in inner]))
    return ids.reshape(shape).transpose(outer + inner).reshape(-1, size)


def _mesh_ids(mesh, count: int) -> np.ndarray:
    """The partitions of a mesh in its own order: listed, as a transposed count, or counted."""
    if mesh.device_ids:
        return np.array(mesh.device_ids)
    ids = np.arange(count)
    if mesh.HasField("iota_ids"):
        ids = ids.reshape(tuple(mesh.iota_ids.dims)).transpose(tuple(mesh.iota_ids.order))
    return ids


def are_known(instruction) -> bool:
    """Returns whether `groups_of` reads all that an instruction says of its groups: a newer XLA may say more."""
    forms = (instruction.mesh_groups, instruction.device_list, instruction.iota_groups, *instruction.replica_groups)
    return all(map(is_known, forms))


def live_meshes() -> list[jax.sharding.Mesh]:
    """Every mesh that the program has made and not forgotten, in an order that does not depend on memory.

    Of those whose axes have names: jax takes numbers too, which no plan can say.
    """
    # Instances refer to their class. All objects (`gc.get_objects`) would hold tuples that other threads make just
    # then, where Python would end with a SystemError.
    found = [o for o in gc.get_referrers(*_classes(jax.sharding.Mesh)) if issubclass(type(o), jax.sharding.Mesh)]
    # Objects that a program has frozen (`gc.freeze`) are not among them; arrays know their own.
    found += [
        a.sharding.mesh for a in jax.live_arrays() if isinstance(getattr(a.sharding, "mesh", None), jax.sharding.Mesh)
    ]
    whole = {mesh for mesh in found if _is_made(mesh) and all(isinstance(name, str) for name in mesh.axis_names)}
    theirs = (m for m in whole if m.size > 1 and OWN_AXIS not in m.axis_names)
    return sorted(theirs, key=lambda m: (m.axis_names, m.devices.shape, _ids(m)))


def _classes(base: type) -> list[type]:
    """A class and all that are derived from it."""
    return [base, *(c for derived in base.__subclasses__() for c in _classes(derived))]


def _is_made(mesh) -> bool:
    """Returns False for an object that another thread is making at the moment, whose attributes are not set yet."""
    try:
        return len(mesh.axis_names) == mesh.devices.ndim == len(mesh.axis_types) and mesh.size > 0
    except AttributeError:
        return False


def _ids(mesh) -> tuple[int, ...]:
    return tuple(device.id for device in mesh.devices.flat)


class Place(NamedTuple):
    """Axes of a mesh that a collective's groups are, in the order in which ranks count."""

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]


def of_devices(meshes: Iterable, device_ids: Sequence[int]) -> list:
    """Returns those meshes whose devices are a module's, in its order."""
    return [mesh for mesh in meshes if _ids(mesh) == tuple(device_ids)]


def places(groups: Groups, meshes: Iterable, *, ordered: bool) -> list[Place]:
    """All axes of meshes, fewest first, whose groups these are.

    ordered: ranks count in the group's order, as of what is gathered or scattered; else groups are sets. Axes of size 1
    are never among them.
    """
    wanted = _normal(groups, ordered)
    found = []
    for mesh in meshes:
        grid = np.arange(mesh.size).reshape(mesh.devices.shape)
        wide = [d for d, size in enumerate(grid.shape) if size > 1]
        for count in range(1, len(wide) + 1):
            choose = itertools.permutations if ordered else itertools.combinations
            for dims in choose(wide, count):
                outer = [d for d in range(grid.ndim) if d not in dims]
                size = int(np.prod([grid.shape[d] for d in dims]))
                if size != len(groups[0]):
                    continue
                if _normal(_as_groups(grid.transpose(outer + list(dims)).reshape(-1, size)), ordered) == wanted:
                    found.append(Place(mesh, tuple(mesh.axis_names[d] for d in dims)))
    return sorted(found, key=lambda place: len(place.axes))


def _normal(groups: Groups, ordered: bool):
    return frozenset(groups) if ordered else frozenset(map(frozenset, groups))


def permutation_places(
    pairs: Sequence[tuple[int, int]], meshes: Iterable
) -> list[tuple[Place, tuple[tuple[int, int], ...]]]:
    """Single mesh axes along which these pairs of partitions go, in all groups alike, with the pairs of ranks."""
    found = []
    for mesh in meshes:
        grid = np.arange(mesh.size).reshape(mesh.devices.shape)
        for dim, size in enumerate(grid.shape):
            if size == 1:
                continue
            lines = np.moveaxis(grid, dim, -1).reshape(-1, size)
            at = {int(p): (line, rank) for line, ps in enumerate(lines) for rank, p in enumerate(ps)}
            perms = [set() for _ in lines]
            inside = all(at[s][0] == at[t][0] for s, t in pairs)
            for s, t in pairs if inside else ():
                perms[at[s][0]].add((at[s][1], at[t][1]))
            if inside and perms[0] and all(perm == perms[0] for perm in perms):
                found.append((Place(mesh, (mesh.axis_names[dim],)), tuple(sorted(perms[0]))))
    return found
