"""all-reduce(a) + all-reduce(b) -> all-reduce(a + b): one message in the place of two. The same of reduce-scatters.

XLA does it too (its pass all-reduce-reassociate), but on CUDA after the hook, which would leave it nothing to merge.
The gradients of a layer's inputs are such sums: those of q, k and v, and of a gate beside its up-projection. Where each
device keeps its own part of them, the slices of that part stand between the all-reduces and the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

from taco_jax.dropin import collective_forms, dataflow
from taco_jax.dropin.collective_forms import Collective
from taco_jax.dropin.hlo_module import Computation, Module
from taco_jax.dropin.hlo_proto import FLOATS, dtype_name

# Linear, element by element or a change of place: the sum may be taken before or after them. Slices begin at the same
# place in all terms.
CHAIN = ("convert", "reshape", "bitcast", "copy", "transpose", "slice", "dynamic-slice")
SUMS = ("all_reduce", "reduce_scatter")


class Term(NamedTuple):
    """A term of a sum: the collective that it is of, and what happens to that on the way, nearest to the sum first."""

    collective: Collective | None
    chain: tuple
    id: int


def merge(
    module: Module, wanted: Callable[[Collective], Hashable], partitions: int, meshes, groups: list | None = None
) -> int:  # fmt: skip
    """Merges sums of the results of all-reduces and reduce-scatters.

    wanted: equal for those that may be one message, None for what stays as it is. groups: gets the ids of those that
    became one.
    Returns how many collectives are gone; where some are, the module is to be read anew.
    """
    found: dict[int, dict[int, Collective]] = {}
    wants: dict[int, Hashable] = {}
    for c in collective_forms.collectives(module, partitions, meshes):
        alone = c.operation in SUMS and not c.instruction.shape.tuple_shapes
        if alone and dtype_name(c.instruction.shape) in FLOATS.values() and (want := wanted(c)) is not None:
            found.setdefault(c.computation.proto.id, {})[c.instruction.id] = c
            wants[c.instruction.id] = want
    gone = 0
    for id, by_id in found.items():
        if len(by_id) > 1:
            gone += _merge_in(module.computation(id), by_id, wants, groups)
    return gone


def _merge_in(
    computation: Computation, by_id: dict[int, Collective], wants: dict[int, Hashable], into: list | None
) -> int:  # fmt: skip
    gone = 0
    for add in [i for i in computation.proto.instructions if i.opcode == "add"]:
        users = [computation.instructions[i] for i in computation.users[add.id]]
        if len(users) == 1 and users[0].opcode == "add" and _alike(users[0], add) and not _is_root(computation, add.id):
            continue  # a part of a larger sum
        adds, terms = [], []
        _collect(computation, add, by_id, adds, terms)
        groups: dict[tuple, list[Term]] = {}
        for term in terms:
            if term.collective is not None:
                kind = wants[term.collective.instruction.id], *_kind(term)
                groups.setdefault(kind, []).append(term)
        merged = [group for group in groups.values() if len(group) > 1]
        if merged:
            if into is not None:
                into += [[term.collective.instruction.id for term in group] for group in merged]
            _rebuild(computation, add, adds, terms, merged)
            gone += sum(len(group) - 1 for group in merged)
    return gone


def _alike(a, b) -> bool:
    return a.shape.element_type == b.shape.element_type and list(a.shape.dimensions) == list(b.shape.dimensions)


def _is_root(computation: Computation, id: int) -> bool:
    return computation.proto.root_id == id


def _read_once(computation: Computation, id: int) -> bool:
    """Returns whether one operand of one instruction is all that reads a value."""
    users = computation.users[id]
    if _is_root(computation, id) or len(users) != 1:
        return False
    return list(computation.instructions[users[0]].operand_ids).count(id) == 1


def _collect(computation: Computation, add, by_id, adds: list, terms: list[Term]) -> None:
    """The adds and the terms of a sum, in order."""
    adds.append(add)
    for id in add.operand_ids:
        operand = computation.instructions[id]
        if operand.opcode == "add" and _read_once(computation, id) and _alike(operand, add):
            _collect(computation, operand, by_id, adds, terms)
        else:
            terms.append(_term(computation, id, by_id))


def _term(computation: Computation, id: int, by_id) -> Term:
    chain, at = [], id
    while _read_once(computation, at):
        instruction = computation.instructions[at]
        if at in by_id:
            return Term(by_id[at], tuple(chain), id)
        if instruction.opcode not in CHAIN:
            break
        chain.append(instruction)
        at = instruction.operand_ids[0]
    return Term(None, (), id)


def _kind(term: Term) -> tuple:
    """Equal for terms whose collectives can be one."""
    c, computation = term.collective, term.collective.computation
    starts = lambda step: tuple(dataflow.index(computation, i) for i in step.operand_ids[1:])
    chain = tuple((dataflow.attributes(step), starts(step)) for step in term.chain)
    # Ranks of a reduce-scatter have an order.
    groups = frozenset(map(frozenset, c.groups)) if c.operation == "all_reduce" else frozenset(c.groups)
    shapes = (computation.instructions[c.instruction.operand_ids[0]].shape, c.instruction.shape)
    return groups, c.operation, c.dimension, *(shape.SerializeToString() for shape in shapes), chain


def _rebuild(computation: Computation, add, adds: list, terms: list[Term], merged: list[list[Term]]) -> None:
    """Makes the sum anew, with one collective for each group of terms, and drops the old one."""
    sums = {group[0].id: _merged(computation, add, group) for group in merged}
    dropped = {term.id for group in merged for term in group[1:]}
    ids = [sums.get(term.id, term.id) for term in terms if term.id not in dropped]
    total = ids[0]
    for id in ids[1:]:
        total = computation.make(add, "add", add.shape, [total, id], like=add).id
    for old in (
        *adds[1:],
        *(i for group in merged for term in group for i in (*term.chain, term.collective.instruction)),
    ):
        computation.delete(old)
    computation.take_over(add, computation.instructions[total])


def _merged(computation: Computation, before, group: list[Term]) -> int:
    """The id of chain(collective(the sum of the group's operands))."""
    first = group[0].collective.instruction
    total = first.operand_ids[0]
    shape = computation.instructions[total].shape
    for term in group[1:]:
        operand = term.collective.instruction.operand_ids[0]
        total = computation.make(before, "add", shape, [total, operand], like=first).id
    for step in (first, *reversed(group[0].chain)):
        copy = computation.add(before, step)
        copy.name = computation.module.fresh_name(step.name)
        copy.operand_ids[0] = total
        del copy.control_predecessor_ids[:]
        total = copy.id
    return total
