"""Replaces a module's collectives by compressed ones, as the plan says. Returns what became of each."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from taco_jax.compression import tuned
from taco_jax.dropin import collective_forms, combine_sums, dataflow, merge_sums, share_collectives, sum_and_slice
from taco_jax.dropin.collective_forms import Collective
from taco_jax.dropin.hlo_module import Module
from taco_jax.dropin.hlo_proto import FLOATS, ModuleProto, dtype_name, nbytes
from taco_jax.dropin.mesh_axes import Place, live_meshes, of_devices, places
from taco_jax.dropin.plan import DropInPlan, Rule, directed
from taco_jax.dropin.replacement import Request, find
from taco_jax.dropin.report import History, Program, Site, note
from taco_jax.dropin.splice import Choice, ReplacedParts, arrays, memory_order, splice

NOTE = "taco_jax_drop_in"
UNNAMED = "the plan does not name it"

# What one device sends of n bytes among p ranks, exactly; of a gather, n of the result.
SENT = {
    "all_reduce": lambda n, p: 2 * n * (p - 1) / p,
    "reduce_scatter": lambda n, p: n * (p - 1) / p,
    "all_gather": lambda n, p: n * (p - 1) / p,
    "all_to_all": lambda n, p: n * (p - 1) / p,
    "collective_permute": lambda n, p: float(n),
}


class Partitioned(NamedTuple):
    """A module of several devices, taken apart. made: the meshes that there are; meshes: those of its devices."""

    module: Module
    partitions: int
    made: list
    meshes: list

    @property
    def axes(self) -> frozenset[tuple[str, bool]]:
        """Each axis of the meshes that there are, and whether the module's own have several devices along it."""
        wide = {name for mesh in self.meshes for name, size in mesh.shape.items() if size > 1}
        return frozenset((name, name in wide) for mesh in self.made for name in mesh.axis_names)


def partitioned(serialized: bytes) -> Partitioned | None:
    """The module with its collectives taken apart; None where one device runs it."""
    module = Module(serialized)
    devices = [i for replica in module.proto.device_assignment.devices for i in replica.ids[:1]]
    if len(devices) < 2:
        return None
    made = live_meshes()
    meshes = of_devices(made, devices)
    if collective_forms.take_apart(module):
        module = Module(module.serialize())
    return Partitioned(module, len(devices), made, meshes)


def rewrite(serialized: bytes, plan: DropInPlan, history: History) -> bytes | None:
    """The module with its collectives compressed, None where it has none. Lists all of them in the history."""
    opened = partitioned(serialized)
    if opened is None:
        return None
    partitions, meshes = opened.partitions, opened.meshes
    module, matched, _ = fewer_messages(opened.module, plan, partitions, meshes)
    if combine_sums.combine(module, Chooser(module, plan).joined, partitions, meshes):
        module = Module(module.serialize())
    found = collective_forms.collectives(module, partitions, meshes)
    if not found:
        return None
    chooser = Chooser(module, plan)
    chooser.rules |= matched
    choices = [(c, chooser.choose(c)) for c in found]
    runs = [module.runs(c.computation) for c in found]
    for (collective, chosen), times in zip(choices, runs):
        chooser.apply(collective, chosen, times)
    id = hashlib.sha256(serialized).hexdigest()[:16]
    written = note(plan, Program(id, module.name, tuple(chooser.sites), frozenset(chooser.rules), opened.axes))
    history.add(written)
    write_note(module, written)
    return module.serialize()


def fewer_messages(module: Module, plan: DropInPlan, partitions: int, meshes) -> tuple[Module, set[int], list]:
    """Lets equal collectives, and sums of sums, be one message where the plan compresses them alike.

    Returns the module, the numbers of the plan's lines that matched, and ids of the collectives that became one.
    """
    matched: set[int] = set()
    groups: list[list[int]] = []
    for first in (share_collectives.share, merge_sums.merge):
        if first(module, lambda c: _merges(c, plan, matched), partitions, meshes, groups):
            module = Module(module.serialize())
    return module, matched, groups


def write_note(module: Module, written: str) -> None:
    """Leaves the note in the program, where the persistent compilation cache keeps it: at its first argument."""
    if 0 in module.entry.parameters:
        first = module.entry.instructions[module.entry.parameters[0]]
        first.frontend_attributes.map.add(key=NOTE, value=written)


def read_note(serialized: bytes) -> str | None:
    """The note of a compiled module, None of one that was compiled without a plan."""
    if NOTE.encode() not in serialized:
        return None
    entry = Module(serialized).entry
    for attribute in entry.instructions[entry.parameters[0]].frontend_attributes.map:
        if attribute.key == NOTE:
            return attribute.value
    return None


def donates(serialized: bytes) -> bool:
    """Returns whether a module writes results into the memory of its arguments."""
    proto = ModuleProto.FromString(serialized)
    return bool(proto.input_output_alias or proto.buffer_donor)


def _merges(collective: Collective, plan: DropInPlan, matched: set[int]) -> Hashable:
    """A key of how the plan compresses a collective, None where it stays exact.

    Sums of results become sums of operands, and equal collectives one, where the plan sends them alike: those of two
    lines too, of which the first one's is then the name. Adds the number of the line to `matched`.
    """
    if collective.why_exact:
        return None
    operation, value = collective.operation, collective.instruction.id
    if operation == "all_reduce" and not collective.instruction.shape.tuple_shapes:
        module = collective.computation.module
        if sum_and_slice.find(module, collective.computation, value, collective.groups):
            operation = "reduce_scatter"
    rule, _ = _rule(collective, collective.parts[0], plan, operation)
    if rule is None:
        return None
    matched.add(plan.rules.index(rule))
    return None if rule.compression is None else (frozenset(rule.axes), rule.compression)


def _rule(collective: Collective, part, plan: DropInPlan, operation: str) -> tuple[Rule | None, int]:
    """The plan's rule for a collective, and which of its places it is for."""
    for n, place in enumerate(collective.places):
        wide = {a for a, size in zip(place.mesh.axis_names, place.mesh.devices.shape) if size > 1}
        for rule in plan.rules:
            of_rule = frozenset(rule.axes) & wide
            if of_rule == frozenset(place.axes) and rule.matches(operation, part.op_name):
                return rule, n
    return None, 0


class Chooser:
    """The decisions about one module. First every collective is looked at as it came, then all are changed."""

    def __init__(self, module: Module, plan: DropInPlan):
        self.module, self.plan = module, plan
        self.sites: list[Site] = []
        self.rules: set[int] = set()

    def choose(self, collective: Collective) -> list[Choice]:
        choices = [self.choice(collective, part) for part in collective.parts]
        joined: dict[tuple, list[int]] = {}
        for n, choice in enumerate(choices):
            if choice.request is not None:
                # XLA has combined sums of small arrays, as of gradients: they stay one message.
                joined.setdefault(choice.message_key or (n,), []).append(n)
        for parts in joined.values():
            self._send(collective, choices, parts)
        return choices

    def joined(self, collective: Collective) -> tuple | None:
        """Equal for sums that may become one message, None for what stays exact or goes alone."""
        (part,) = collective.parts
        return self.choice(collective, part).message_key

    def _send(self, collective: Collective, choices: Sequence[Choice], parts: Sequence[int]) -> None:
        """Finds the replacement of parts that go in one message, where that sends less than they do."""
        first = choices[parts[0]]
        shapes = tuple(shape for n in parts for shape in choices[n].request.shapes)
        found = find(first.request._replace(shapes=shapes))
        sizes = {n: _size(collective, collective.parts[n]) for n in parts}
        total = sum(sizes.values())
        if found.codec == "none" or found.sent >= SENT[first.operation](total, _ranks(first.place)):
            for n in parts:
                codec = first.request.compression.codecs[0].name
                choices[n].reason = f"{sizes[n]:,} bytes, of which {codec} would send no fewer"
            return
        message = ReplacedParts(found, {n: found.sent * size / total for n, size in sizes.items()})
        for n in parts:
            choices[n].message = message

    def choice(self, collective: Collective, part) -> Choice:
        operation, own = collective.operation, None
        if operation == "all_reduce" and not collective.why_exact and len(part.values) == 1:
            own = self._own_slice(collective, part)
            operation = "reduce_scatter" if own else operation
        choice = Choice(operation)
        if collective.places:
            # A program may have other meshes over the same devices: the plan speaks of this one.
            planned = {axis for rule in self.plan.rules for axis in rule.axes}
            of_plan = (place for place in collective.places if planned & set(place.mesh.axis_names))
            choice.place = next(of_plan, collective.places[0])
        rule, n = _rule(collective, part, self.plan, operation)
        if rule is not None:
            choice.rule, choice.place = rule, collective.places[n]
            self.rules.add(self.plan.rules.index(rule))
        choice.reason = collective.why_exact or self._why_unnamed(collective, choice)
        if choice.reason:
            return choice
        choice.own_slice = own
        choice.reason = self._fit(collective, part, choice, n)
        return choice

    def _own_slice(self, collective: Collective, part):
        """The slice of a sum over ranks in the order of an axis."""
        for place in collective.places:
            ordered = places(collective.groups, [place.mesh], ordered=True)
            if any(p.axes == place.axes for p in ordered):
                return sum_and_slice.find(self.module, collective.computation, part.values[0], collective.groups)
        return None

    def _why_unnamed(self, collective: Collective, choice: Choice) -> str:
        if choice.rule is not None:
            return "" if choice.rule.compression is not None else "the plan says so"
        if not collective.places:
            return "its groups are no axes of the program's meshes"
        axes = choice.place.axes
        if len(axes) > 1 and any(set(rule.axes) & set(axes) for rule in self.plan.rules):
            return f"it goes over {' and '.join(axes)} at once; the plan would name them together, {'+'.join(axes)!r}"
        return UNNAMED

    def _fit(self, collective: Collective, part, choice: Choice, n: int) -> str:
        """Finds the replacement of one part. Returns why there is none, else ""."""
        computation, operation = collective.computation, choice.operation
        operands = [computation.instructions[i] for i in part.operands]
        shape = operands[0].shape
        if dtype_name(shape) not in FLOATS.values():
            return f"its values are {dtype_name(shape) or 'no numbers'}"
        if not shape.dimensions:
            return "a scalar"
        if any(shape.is_dynamic_dimension):
            return "its shape is dynamic"
        if not part.values:
            return "nothing reads it"
        if operation == "all_gather" and choice.rule.operation is None and choice.rule.pattern is None:
            if dataflow.is_argument(self.module, computation, part.operands[0]):
                choice.gathers_weights = True
                return "it gathers an argument of the program (weights), which a plan names by operation: all_gather"
        compression = directed(choice.rule.compression, part.direction)
        codec = compression.codecs[0]
        if codec.exact:
            return "the plan says so"
        order = memory_order(shape)
        if any(memory_order(s) != order for s in arrays(part.shape)):
            return "its layout changes on the way"
        ranks = _ranks(choice.place)
        size = _size(collective, part)
        least = self._least(choice.rule, codec.name, ranks, choice.place)
        if size < least:
            return f"{size:,} bytes, below min_bytes={least:,}"
        dimension = choice.own_slice.dimension if choice.own_slice else collective.dimension
        dims = tuple(shape.dimensions[d] for d in order)
        # Messages are padded: of very few values nothing is saved, in whatever message they are.
        if ranks * codec.of(dims).wire_bytes(-(-math.prod(dims) // ranks)) >= nbytes(shape):
            return f"{size:,} bytes, of which {codec.name} would send no fewer"
        cut = operation in ("reduce_scatter", "all_gather", "all_to_all")
        request = Request(
            operation, choice.place, dtype_name(shape),
            shapes=tuple(tuple(o.shape.dimensions[d] for d in order) for o in operands), compression=compression,
            dimension=order.index(dimension) if cut else 0, perm=collective.perms[n] if collective.perms else (),
        )  # fmt: skip
        if codec.per_token and cut and request.dimension == len(order) - 1:
            return f"codec {codec.name!r} has one scale a token, and the tokens' own dim is cut or joined here"
        choice.request = request
        return ""

    def _least(self, rule: Rule, codec: str, ranks: int, place: Place) -> int:
        """The size from which it pays, as collectives decide it."""
        for least in (rule.compression.min_bytes, self.plan.min_bytes):
            if least is not None:
                return least
        device = place.mesh.devices.flat[0]
        return tuned.default_min_bytes(codec, ranks, device, link=rule.compression.link)

    def apply(self, collective: Collective, choices: Sequence[Choice], runs: int) -> None:
        """Lists the sites and puts the replacements in."""
        for n, choice in enumerate(choices):
            self.sites.append(self.site(collective, n, choice, runs))
        if any(choice.message for choice in choices):
            splice(collective, choices)

    def site(self, collective: Collective, n: int, choice: Choice, runs: int) -> Site:
        part, message = collective.parts[n], choice.message
        shape = collective.computation.instructions[part.operands[0]].shape
        ranks = len(collective.groups[0]) if collective.groups else 2
        before = SENT[choice.operation](_size(collective, part), ranks)
        rule = choice.rule
        named = rule is not None and rule.compression is not None and not choice.gathers_weights
        return Site(
            program=self.module.name, op_name=part.op_name, operation=choice.operation,
            axes=choice.place.axes if choice.place else (), direction=part.direction, dtype=dtype_name(shape),
            shape=tuple(shape.dimensions), runs=runs, before=before,
            after=message.shares[n] if message else before, codec=message.replacement.codec if message else "none",
            reason=choice.reason, named=named, ranks=ranks,
        )  # fmt: skip


def _ranks(place: Place) -> int:
    sizes = dict(zip(place.mesh.axis_names, place.mesh.devices.shape))
    return math.prod(sizes[axis] for axis in place.axes)


def _size(collective: Collective, part) -> int:
    """Bytes of the message as `min_bytes` counts them: of a gather, of its result."""
    if collective.operation == "all_gather":
        return nbytes(part.shape) if not collective.instruction.opcode.endswith("-start") else 0
    return sum(nbytes(collective.computation.instructions[i].shape) for i in part.operands)
