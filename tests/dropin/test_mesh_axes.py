"""Replica groups in every form of XLA's, and the mesh axes that they are."""

import functools
import itertools
import sys
import threading

import jax
import numpy as np
import pytest
from dropin_programs import mesh

from taco_jax.dropin import mesh_axes
from taco_jax.dropin.hlo_proto import MESSAGES

Instruction = MESSAGES["Instruction"]


def groups_of(**fields):
    return mesh_axes.groups_of(Instruction(**fields), 8)


def of_axes(on, *axes):
    """The groups of axes, by another way than the product: what all other coordinates share."""
    found = {}
    for place, partition in zip(itertools.product(*map(range, on.devices.shape)), itertools.count()):
        at = dict(zip(on.axis_names, place))
        rank = 0
        for axis in axes:
            rank = rank * on.shape[axis] + at[axis]
        found.setdefault(tuple(at[a] for a in on.axis_names if a not in axes), {})[rank] = partition
    return tuple(tuple(group[rank] for rank in sorted(group)) for group in found.values())


def test_listed():
    rows = ((0, 2), (1, 3))
    assert groups_of(replica_groups=[{"ids": row} for row in rows]) == rows
    assert groups_of(device_list={"replica_groups": [{"ids": row} for row in rows]}) == rows
    assert groups_of() == (tuple(range(8)),)


def test_iota():
    plain = {"groups": 2, "size": 4, "dims": [8], "order": [0]}
    turned = {"groups": 4, "size": 2, "dims": [2, 4], "order": [1, 0]}
    assert groups_of(iota_groups=plain) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert groups_of(iota_groups=turned) == groups_of(device_list={"iota_groups": turned})
    assert groups_of(iota_groups=turned) == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_axes_of_a_mesh():
    def listed(*axes, sizes=(2, 4), **ids):
        on = {"axes": [{"name": f"axis_{n}", "size": size} for n, size in enumerate(sizes)]} | ids
        return groups_of(mesh_groups={"mesh": on, "axes": axes})

    assert listed({"axis": 0}) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert listed({"axis": 1}) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert listed({"axis": 1}, {"axis": 0}) == ((0, 4, 1, 5, 2, 6, 3, 7),)
    # Parts of an axis: the outer and the inner half of one of 4.
    assert listed({"axis": 1, "part": {"before": 1, "size": 2}}) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert listed({"axis": 1, "part": {"before": 2, "size": 2}}) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert listed({"axis": 1}, device_ids=range(7, -1, -1)) == ((7, 6, 5, 4), (3, 2, 1, 0))
    # Its devices as those of another mesh, transposed: XLA of jax 0.10 writes replicated dims last.
    turned = {"dims": [2, 4], "order": [1, 0]}
    assert listed({"axis": 0}, sizes=(4, 2), iota_ids=turned) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert listed({"axis": 1}, sizes=(4, 2), iota_ids=turned) == ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    "form", ["mesh_groups", "device_list", "iota_groups", "mesh_groups.mesh", "device_list.mesh_groups.mesh.iota_ids"]
)
def test_groups_in_a_form_of_a_later_xla_are_told(form):
    instruction = Instruction(device_list={"mesh_groups": {"mesh": {"iota_ids": {}}}}, mesh_groups={"mesh": {}})
    assert mesh_axes.are_known(instruction)
    # A field 100 in one of the messages that say what the groups are.
    functools.reduce(getattr, form.split("."), instruction).MergeFromString(b"\xa0\x06\x01")
    assert not mesh_axes.are_known(instruction)


@pytest.mark.parametrize("axes", [("a",), ("b",), ("c",), ("a", "b"), ("c", "a"), ("b", "c"), ("a", "b", "c")], ids=str)
def test_axes_are_found(axes):
    on = mesh(a=2, one=1, b=2, c=2)
    (place,) = mesh_axes.places(of_axes(on, *axes), [on], ordered=True)
    assert place.axes == axes
    (place,) = mesh_axes.places(of_axes(on, *axes), [on], ordered=False)
    assert set(place.axes) == set(axes)


def test_groups_that_are_no_axes():
    on = mesh(a=2, b=4)
    assert not mesh_axes.places(((0, 1), (2, 3), (4, 5), (6, 7)), [on], ordered=False)
    assert not mesh_axes.places(((0, 5), (1, 4), (2, 7), (3, 6)), [on], ordered=False)
    # The same groups with ranks in another order: of a sum they are the axis's, of a gather they are not.
    turned = tuple(group[::-1] for group in of_axes(on, "b"))
    assert mesh_axes.places(turned, [on], ordered=False) and not mesh_axes.places(turned, [on], ordered=True)


def test_permutations():
    on = mesh(a=2, b=4)
    ring = [(p, p - p % 4 + (p + 1) % 4) for p in range(8)]
    ((place, perm),) = mesh_axes.permutation_places(ring, [on])
    assert place.axes == ("b",) and perm == ((0, 1), (1, 2), (2, 3), (3, 0))
    ((place, perm),) = mesh_axes.permutation_places([(p, p + 4) for p in range(4)], [on])
    assert place.axes == ("a",) and perm == ((0, 1),)
    # Not the same in both groups; between groups.
    assert not mesh_axes.permutation_places(ring[:4], [on]) and not mesh_axes.permutation_places([(0, 5)], [on])


def test_meshes_are_those_of_the_programs_devices():
    ours, other = mesh(tensor=4), mesh(data=2, model=4)
    turned = jax.sharding.Mesh(ours.devices[::-1], ("turned",))
    made = mesh_axes.live_meshes()
    assert {ours, other, turned} <= set(made) and made == sorted(
        made, key=lambda m: (m.axis_names, m.devices.shape, [d.id for d in m.devices.flat])
    )
    assert ours in (found := mesh_axes.of_devices(made, range(4))) and other not in found and turned not in found
    assert turned in mesh_axes.of_devices(made, (3, 2, 1, 0))
    assert np.prod([m.size for m in found]) == 4 ** len(found)


def test_a_mesh_whose_axes_are_numbers_is_left_out():
    numbered = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (0, 1))
    mixed = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", 1))
    found = mesh_axes.live_meshes()
    assert numbered not in found and mixed not in found


def test_a_mesh_that_another_thread_is_making_is_left_out():
    """Programs that compile in several threads make meshes while others look for them."""
    on, half_made = mesh(data=2, tensor=4), object.__new__(jax.sharding.Mesh)
    found = mesh_axes.live_meshes()
    assert on in found and not any(m is half_made for m in found)


def test_looking_for_meshes_spoils_nothing_that_another_thread_is_making():
    """Python enlarges a tuple in its place, and ends with a SystemError where somebody else has got hold of it."""
    before, stop, errors = sys.getswitchinterval(), threading.Event(), []

    def make_tuples():
        try:
            while not stop.is_set():
                tuple([n] for n in range(40))
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=make_tuples)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(20):
            mesh_axes.live_meshes()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not errors
