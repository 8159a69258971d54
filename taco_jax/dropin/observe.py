"""Puts an observer beside every collective of a module, and leaves the collectives as they are."""

from __future__ import annotations

import dataclasses
import hashlib

from taco_jax.codec import as_codec
from taco_jax.compression.compression import Compression
from taco_jax.dropin import collective_forms, host_calls, observer
from taco_jax.dropin.collective_forms import Collective
from taco_jax.dropin.hlo_module import Module
from taco_jax.dropin.hlo_proto import NAMES
from taco_jax.dropin.plan import DropInPlan, Rule
from taco_jax.dropin.replacement import inline
from taco_jax.dropin.report import History, Program, note
from taco_jax.dropin.rewrite import UNNAMED, Chooser, fewer_messages, partitioned, write_note
from taco_jax.dropin.splice import Choice, memory_order, plain

NOT_MEASURED = "its axis or operation is not measured"
UINT32 = next(number for number, name in NAMES.items() if name == "uint32")


@dataclasses.dataclass(frozen=True)
class Measuring:
    """Names of what is measured while it is in force, as a plan is.

    named: (axes, operation or None: all); None: all axes. codecs: that are tried. min_bytes: smaller collectives are
    left out; None: as tuned for codec, ranks and link.
    """

    codecs: tuple[str, ...]
    named: tuple[tuple[tuple[str, ...], str | None], ...] | None = None
    min_bytes: int | None = None
    rules = ()

    @property
    def axes(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(axes for axes, _ in self.named or ()))

    @property
    def digest(self) -> str:
        """Equal for equal ones, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def plan(self, found: list[Collective]) -> DropInPlan:
        """The plan that names the collectives that are measured, with the codec of the fewest bits."""
        named = self.named
        if named is None:
            named = dict.fromkeys((place.axes, None) for collective in found for place in collective.places)
        least = Compression(min(self.codecs, key=lambda name: as_codec(name).bits))
        rules = sorted((Rule(*of, None, least) for of in named), key=lambda rule: rule.generality)
        return DropInPlan(tuple(rules), self.min_bytes)


def observe(serialized: bytes, measuring: Measuring, history: History) -> bytes | None:
    """The module with an observer beside each collective that is measured, None where it has none.

    Lists all collectives in the history. The results of the module are those of before, bit for bit.
    """
    opened = partitioned(serialized)
    if opened is None:
        return None
    module, partitions, meshes = opened.module, opened.partitions, opened.meshes
    found = collective_forms.collectives(module, partitions, meshes)
    if not found:
        return None
    plan = measuring.plan(found)
    chooser = Chooser(module, plan)
    together = _together(module, plan, partitions, meshes)
    id = hashlib.sha256(serialized).hexdigest()[:16]
    chosen = [(c, n, chooser.choice(c, part)) for c in found for n, part in enumerate(c.parts)]
    runs = {c.computation.proto.id: module.runs(c.computation) for c in found}
    sites = []
    impossible = next(filter(None, (host_calls.why_not(mesh.devices.flat[0]) for mesh in meshes)), None)
    for collective, n, choice in chosen:
        if impossible and choice.request is not None:
            choice.request, choice.reason = None, impossible
        if choice.reason == UNNAMED:
            choice.reason = NOT_MEASURED
        site = chooser.site(collective, n, choice, runs[collective.computation.proto.id])
        sites.append(dataclasses.replace(site, message=together.get(collective.instruction.id, -1)))
        if choice.request is not None:
            _put(collective, n, choice, measuring.codecs, observer.header(id, len(sites) - 1))
    for computation in {c.computation.proto.id: c.computation for c, _, choice in chosen if choice.request}.values():
        computation.reorder()
    written = note(measuring, Program(id, module.name, tuple(sites), frozenset(chooser.rules), opened.axes))
    history.add(written)
    write_note(module, written)
    return module.serialize()


def _together(module: Module, plan: DropInPlan, partitions: int, meshes) -> dict[int, int]:
    """{id of a collective: a number}, equal for those that become one message under the plan."""
    _, _, groups = fewer_messages(Module(module.serialize()), plan, partitions, meshes)
    number: dict[int, int] = {}
    for group in groups:
        # The first of a group may be of an earlier one, as where equal collectives are terms of a sum.
        known = next((number[id] for id in group if id in number), len(number))
        number |= dict.fromkeys(group, known)
    return number


def _put(collective: Collective, n: int, choice: Choice, codecs: tuple[str, ...], header: list[int]) -> None:
    """Puts the observer of one part of a collective in front of it; `reorder` moves it behind its operands."""
    computation, before = collective.computation, collective.instruction
    part, request = collective.parts[n], choice.request
    operands = list(part.operands)
    result = None
    if request.operation in observer.SUMS:
        operands.append(part.values[0])
        shape = computation.instructions[part.values[0]].shape
        result = tuple(shape.dimensions[d] for d in memory_order(shape))
    observed = observer.Observed(
        request.operation, request.place, request.dtype, request.shapes,
        result=result, dimension=request.dimension, codecs=codecs,
    )  # fmt: skip
    module = observer.find(observed)
    operands = [plain(computation, before, id) for id in operands]
    inline(module, computation, before, [_constant(computation, before, header), *operands], f"{part.op_name}/measured")


def _constant(computation, before, words: list[int]) -> int:
    """The id of a new constant, uint32[n], in front of `before`."""
    shape = type(before.shape)()
    shape.element_type = UINT32
    shape.dimensions.append(len(words))
    shape.is_dynamic_dimension.append(False)
    shape.layout.minor_to_major.append(0)
    new = computation.make(before, "constant", shape, [], like=before)
    new.literal.shape.CopyFrom(shape)
    new.literal.u32s.extend(words)
    return new.id
