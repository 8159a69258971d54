"""A collective instruction of HLO, in each of the forms that XLA writes, as an operation on arrays."""

from __future__ import annotations

import dataclasses

from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.mesh_axes import Groups, Place, groups_of, permutation_places, places

OPERATIONS = {
    "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather",
    "all-to-all": "all_to_all", "collective-permute": "collective_permute",
}  # fmt: skip
# Written where a collective has been made asynchronous already.
STARTS = tuple(f"{opcode}-start" for opcode in OPERATIONS)


@dataclasses.dataclass(frozen=True)
class Part:
    """One message of a collective.

    operands: ids; several of an all-to-all that XLA has cut. values: ids of the instructions that are its result, ()
    where nothing reads it.
    """

    operands: tuple[int, ...]
    values: tuple[int, ...]
    shape: object  # of the result; of an all-to-all in pieces, of the tuple


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

    @property
    def op_name(self) -> str:
        return self.instruction.metadata.op_name

    @property
    def direction(self) -> str:
        return "backward" if "transpose(jvp" in self.op_name else "forward"


def collectives(module: Module, partitions: int, meshes) -> list[Collective]:
    """Every collective of a module, in the module's order."""
    found = []
    for computation in module.bodies():
        for instruction in list(computation.proto.instructions):
            opcode = instruction.opcode.removesuffix("-start")
            if opcode in OPERATIONS:
                found.append(_read(module, computation, instruction, OPERATIONS[opcode], partitions, meshes))
    return found


def _read(module, computation, instruction, operation, partitions, meshes) -> Collective:
    perms: tuple = ()
    if operation == "collective_permute":
        pairs = [(pair.source, pair.target) for pair in instruction.source_target_pairs]
        found = permutation_places(pairs, meshes)
        groups, at, perms = (), tuple(p for p, _ in found), tuple(perm for _, perm in found)
    else:
        groups = groups_of(instruction, partitions)
        ordered = operation != "all_reduce"
        at = tuple(places(groups, meshes, ordered=ordered))
    parts, why = _parts(computation, instruction, operation)
    dims = instruction.dimensions
    return Collective(
        computation, instruction, operation, groups, at, parts, dims[0] if dims else 0, perms,
        why or _why_exact(module, computation, instruction, operation, groups, at),
    )  # fmt: skip


def _parts(computation: Computation, instruction, operation: str) -> tuple[tuple[Part, ...], str]:
    """(messages, why it must stay exact)."""
    operands = tuple(instruction.operand_ids)
    if instruction.opcode.endswith("-start"):
        return (Part(operands, (), instruction.shape),), "XLA has made it asynchronous already"
    if not instruction.shape.tuple_shapes:
        return (Part(operands, (instruction.id,), instruction.shape),), ""
    readers = [computation.instructions[i] for i in computation.users[instruction.id]]
    if operation == "all_to_all":
        return (Part(operands, (instruction.id,), instruction.shape),), ""
    shapes = list(instruction.shape.tuple_shapes)
    whole = instruction.id == computation.proto.root_id or any(r.opcode != "get-tuple-element" for r in readers)
    parts = tuple(
        Part((operand,), tuple(r.id for r in readers if r.opcode == "get-tuple-element" and r.tuple_index == n), shape)
        for n, (operand, shape) in enumerate(zip(operands, shapes))
    )
    return parts, "its results are handed on as one tuple" if whole else ""


def _why_exact(module, computation, instruction, operation, groups, at) -> str:
    if operation in ("all_reduce", "reduce_scatter"):
        reducer = module.computation(instruction.called_computation_ids[0])
        if reducer.root.opcode != "add":
            return f"its reduction is {reducer.root.opcode}, not a sum"
    if operation in ("all_reduce", "reduce_scatter", "all_gather") and not instruction.use_global_device_ids:
        return "its groups are of replicas (pmap), not of a mesh"
    if operation == "collective_permute" and not instruction.channel_id:
        return "it goes between replicas (pmap), not over a mesh"
    if any(len(group) != len(groups[0]) for group in groups):
        return "its groups have different sizes"
    return ""
