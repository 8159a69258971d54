"""A collective instruction of HLO, in each of the forms that XLA writes, as an operation on arrays."""

from __future__ import annotations

import dataclasses
import re

from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.mesh_axes import Groups, Place, are_known, groups_of, permutation_places, places

OPERATIONS = {
    "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather",
    "all-to-all": "all_to_all", "collective-permute": "collective_permute",
}  # fmt: skip
# Written where a collective has been made asynchronous already.
STARTS = tuple(f"{opcode}-start" for opcode in OPERATIONS)


JOINED = re.compile(r"(.*)\(([^()]*:[^()]*)\)(.*)")


@dataclasses.dataclass(frozen=True)
class Part:
    """One message of a collective.

    operands: ids; several of an all-to-all that XLA has cut. values: ids of the instructions that are its result, ()
    where nothing reads it.
    """

    operands: tuple[int, ...]
    values: tuple[int, ...]
    shape: object  # of the result; of an all-to-all in pieces, of the tuple
    op_name: str  # JAX's name stack

    @property
    def direction(self) -> str:
        return "backward" if "transpose(jvp" in self.op_name else "forward"


@dataclasses.dataclass(frozen=True)
class Collective:
    """An instruction that sends.

    groups: of partitions. places: mesh axes that these are, fewest first. perms: of a permute, (source, destination)
    pairs for each place. why_exact: what keeps it exact whatever the plan says, else "".
    """

    computation: Computation
    instruction: object
    operation: str
    groups: Groups
    places: tuple[Place, ...]
    parts: tuple[Part, ...]
    dimension: int
    perms: tuple[tuple[tuple[int, int], ...], ...] = ()
    why_exact: str = ""


def collectives(module: Module, partitions: int, meshes) -> list[Collective]:
    """Every collective of a module, in the module's order."""
    found = []
    for computation in module.bodies():
        for instruction in list(computation.proto.instructions):
            if instruction.opcode.removesuffix("-start") in OPERATIONS:
                found.append(_read(computation, instruction, partitions, meshes))
    return found


def take_apart(module: Module) -> bool:
    """Lets readers of a combined collective's tuple read a tuple of its elements, each of which can be replaced.

    Returns whether there was one; then the module is to be read anew.
    """
    found = False
    for computation in module.bodies():
        for instruction in list(computation.proto.instructions):
            if instruction.opcode not in ("all-reduce", "reduce-scatter", "all-gather"):
                continue
            readers = [computation.instructions[i] for i in computation.users[instruction.id]]
            whole = instruction.id == computation.proto.root_id or any(r.opcode != "get-tuple-element" for r in readers)
            if not instruction.shape.tuple_shapes or not whole:
                continue
            found = True
            sent = computation.add(instruction, instruction)
            sent.name = module.fresh_name(instruction.name)
            elements = []
            for n, shape in enumerate(instruction.shape.tuple_shapes):
                element = computation.make(instruction, "get-tuple-element", shape, [sent.id], like=instruction)
                element.tuple_index = n
                elements.append(element.id)
            whole = computation.make(instruction, "tuple", instruction.shape, elements, like=instruction)
            computation.take_over(instruction, whole)
    return found


def _read(computation: Computation, instruction, partitions: int, meshes) -> Collective:
    operation = OPERATIONS[instruction.opcode.removesuffix("-start")]
    groups, perms, at = (), (), ()
    if not are_known(instruction):
        pass  # `_why_exact` says so
    elif operation == "collective_permute":
        pairs = [(pair.source, pair.target) for pair in instruction.source_target_pairs]
        found = permutation_places(pairs, meshes)
        at, perms = tuple(place for place, _ in found), tuple(perm for _, perm in found)
    else:
        groups = groups_of(instruction, partitions)
        at = tuple(places(groups, meshes, ordered=operation != "all_reduce"))
    dims = instruction.dimensions
    return Collective(
        computation, instruction, operation, groups, at,
        parts=_parts(computation, instruction, operation), dimension=dims[0] if dims else 0, perms=perms,
        why_exact=_why_exact(computation, instruction, operation, groups),
    )  # fmt: skip


def _parts(computation: Computation, instruction, operation: str) -> tuple[Part, ...]:
    operands, shape, name = tuple(instruction.operand_ids), instruction.shape, instruction.metadata.op_name
    if not shape.tuple_shapes or operation == "all_to_all" or instruction.opcode.endswith("-start"):
        return (Part(operands, (instruction.id,), shape, name),)
    parts, names = [], _apart(name, len(operands))
    for n, (operand, part) in enumerate(zip(operands, shape.tuple_shapes)):
        readers = [
            r for r in map(computation.instructions.get, computation.users[instruction.id]) if r.tuple_index == n
        ]
        own = [r.metadata.op_name for r in readers if r.metadata.op_name not in ("", name)]
        parts.append(Part((operand,), tuple(r.id for r in readers), part, own[0] if own else names[n]))
    return tuple(parts)


def _apart(op_name: str, count: int) -> list[str]:
    """The names that XLA has written as one where it combined collectives: "a/(b/c:d)" is a/b/c and a/d."""
    match = JOINED.fullmatch(op_name)
    names = match[2].split(":") if match else []
    return [match[1] + name + match[3] for name in names] if len(names) == count else [op_name] * count


def _why_exact(computation: Computation, instruction, operation: str, groups: Groups) -> str:
    if not are_known(instruction):
        return "its groups are written in a form that is not known here"
    if instruction.opcode.endswith("-start"):
        return "XLA has made it asynchronous already"
    if operation in ("all_reduce", "reduce_scatter"):
        reducer = computation.module.computation(instruction.called_computation_ids[0])
        if reducer.root.opcode != "add":
            return f"its reduction is {reducer.root.opcode}, not a sum"
    if operation in ("all_reduce", "reduce_scatter", "all_gather") and not instruction.use_global_device_ids:
        return "its groups are of replicas (pmap), not of a mesh"
    if operation == "collective_permute" and not instruction.channel_id:
        return "it goes between replicas (pmap), not over a mesh"
    if any(len(group) != len(groups[0]) for group in groups):
        return "its groups have different sizes"
    return ""
