"""Puts replacements in the place of the collectives that `rewrite` has chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from taco_jax.dropin import sum_and_slice
from taco_jax.dropin.collective_forms import Collective
from taco_jax.dropin.hlo_module import Computation
from taco_jax.dropin.mesh_axes import Place
from taco_jax.dropin.plan import Rule
from taco_jax.dropin.replacement import Replacement, Request, inline


@dataclasses.dataclass
class ReplacedParts:
    """The replacement of a part, or of several parts of a combined sum that go in one message.

    shares: of what is sent, by part. results: their instructions by part, once the replacement is in its place.
    """

    replacement: Replacement
    shares: dict[int, float]
    results: dict[int, object] | None = None


@dataclasses.dataclass
class Choice:
    """The decision about one part of a collective: the message that it goes in, or the reason why it stays exact.

    gathers_weights: and the plan names its axis alone, not the operation.
    """

    operation: str
    place: Place | None = None
    rule: Rule | None = None
    own_slice: sum_and_slice.OwnSlice | None = None
    request: Request | None = None
    message: ReplacedParts | None = None
    reason: str = ""
    gathers_weights: bool = False

    @property
    def message_key(self) -> tuple | None:
        """Equal for sums that can be one message, None for what is a message of its own, or none."""
        request = self.request
        if request is None or request.operation != "all_reduce" or request.compression.codecs[0].per_token:
            return None
        return request.compression, request.dtype, request.place


def splice(collective: Collective, choices: Sequence[Choice]) -> None:
    """Lets the readers of those parts that have a message read its results. The others are sent as before."""
    old, computation = collective.instruction, collective.computation
    results = [
        _put(collective, choices, choice.message)[n] if choice.message else None for n, choice in enumerate(choices)
    ]
    if len(collective.parts) == 1:
        ((part,), (choice,), (result,)) = collective.parts, choices, results
        if choice.own_slice:
            sum_and_slice.put(computation, choice.own_slice, old.id, result)
            computation.delete(old)
        else:
            computation.take_over(old, result)
        return
    _keep_rest(collective, [n for n, result in enumerate(results) if result is None])
    for part, choice, result in zip(collective.parts, choices, results):
        if result is None:
            continue
        first, *others = (computation.instructions[i] for i in part.values)
        if choice.own_slice:
            sum_and_slice.put(computation, choice.own_slice, first.id, result)
            computation.delete(first)
            continue
        computation.take_over(first, result)
        for other in others:
            _read_instead(computation, other, first_id=part.values[0])
    computation.delete(old)


def _keep_rest(collective: Collective, exact: list[int]) -> None:
    """Sends those parts that stay exact in one collective, as before."""
    if not exact:
        return
    old, computation = collective.instruction, collective.computation
    rest = computation.add(old, old)
    rest.name = computation.module.fresh_name(old.name)
    rest.operand_ids[:] = [collective.parts[n].operands[0] for n in exact]
    shapes = [type(old.shape).FromString(old.shape.tuple_shapes[n].SerializeToString()) for n in exact]
    if len(exact) == 1:
        rest.shape.CopyFrom(shapes[0])
        (part,) = (collective.parts[n] for n in exact)
        for n, id in enumerate(part.values):
            value = computation.instructions[id]
            if n == 0:
                computation.take_over(value, rest)
            else:
                _read_instead(computation, value, first_id=part.values[0])
        return
    del rest.shape.tuple_shapes[:]
    rest.shape.tuple_shapes.extend(shapes)
    for place, n in enumerate(exact):
        for id in collective.parts[n].values:
            value = computation.instructions[id]
            value.operand_ids[:], value.tuple_index = [rest.id], place


def _read_instead(computation: Computation, value, first_id: int) -> None:
    """Lets the readers of `value` read the instruction `first_id`."""
    computation.replace_uses(value.id, first_id)
    computation.delete(value)


def _put(collective: Collective, choices: Sequence[Choice], message: ReplacedParts) -> dict[int, object]:
    """Copies a message's replacement in front of the collective, once. Returns the result's instruction by part."""
    if message.results is not None:
        return message.results
    computation, old = collective.computation, collective.instruction
    operands = [plain(computation, old, id) for n in message.shares for id in collective.parts[n].operands]
    numbers = list(message.shares)
    first, choice = collective.parts[numbers[0]], choices[numbers[0]]
    op_name = f"{first.op_name}/taco_jax.{choice.operation}[{message.replacement.codec}]"
    results = inline(message.replacement.module, computation, old, operands, op_name)
    if choice.own_slice:
        shapes = [_sliced(first.shape, choice.own_slice)]
    else:
        shapes = [shape for n in numbers for shape in arrays(collective.parts[n].shape)]
    results = [r if _is_plain(s) else _bitcast(computation, old, s, r.id) for r, s in zip(results, shapes)]
    if first.shape.tuple_shapes:
        results = [computation.make(old, "tuple", first.shape, [r.id for r in results], like=old)]
    results[0].control_predecessor_ids.extend(old.control_predecessor_ids)
    message.results = dict(zip(numbers, results, strict=True))
    return message.results


def _sliced(shape, own):
    """The shape of each device's part, in the sum's own dtype."""
    cut = type(shape)()
    cut.CopyFrom(shape)
    cut.dimensions[:] = own.computation.instructions[own.slice_id].shape.dimensions
    return cut


def arrays(shape) -> list:
    return list(shape.tuple_shapes) or [shape]


def memory_order(shape) -> tuple[int, ...]:
    """Dims from the outermost in memory to the innermost."""
    minor = list(shape.layout.minor_to_major)
    return tuple(reversed(minor)) if minor else tuple(range(len(shape.dimensions)))


def plain(computation: Computation, before, id: int) -> int:
    """The id of a value with its dims in their order in memory: itself, or a bitcast in front of `before`."""
    shape = computation.instructions[id].shape
    return id if _is_plain(shape) else _bitcast(computation, before, _plain(shape), id).id


def _is_plain(shape) -> bool:
    return memory_order(shape) == tuple(range(len(shape.dimensions)))


def _plain(shape):
    """The shape of the same memory with its dims in their order in memory."""
    plain = type(shape)()
    plain.CopyFrom(shape)
    plain.dimensions[:] = [shape.dimensions[d] for d in memory_order(shape)]
    plain.layout.minor_to_major[:] = reversed(range(len(shape.dimensions)))
    return plain


def _bitcast(computation, before, shape, operand: int):
    return computation.make(before, "bitcast", shape, [operand], like=before)
