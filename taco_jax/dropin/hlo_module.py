"""A module of HLO that is being edited: instructions by id, their users, fresh ids, names and channels."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property

from taco_jax.dropin.hlo_proto import PRED, ModuleProto

# An instruction's id holds its computation's id above these bits.
LOCAL_BITS = 32
# Names that the hook has given.
OURS = re.compile(r"(.*)\.taco(\d+)")


class HloFormError(RuntimeError):
    """The module is not written as the hook knows it. One line."""


class Computation:
    """One computation. Instructions stand in an order in which operands come before their users."""

    def __init__(self, module: Module, proto):
        self.module, self.proto = module, proto
        self.instructions = {i.id: i for i in proto.instructions}
        self._place = {i.id: (n, 0) for n, i in enumerate(proto.instructions)}
        self._next = max((i & (1 << LOCAL_BITS) - 1 for i in self.instructions), default=-1) + 1
        self._added, self._deleted = 0, False
        if any(i >> LOCAL_BITS != proto.id for i in self.instructions):
            raise HloFormError(
                f"{module.proto.name}: ids of instructions do not name their computation; use jax 0.10.2 to 0.12"
            )

    @property
    def root(self):
        return self.instructions[self.proto.root_id]

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Ids of the instructions that read each instruction, as the module came in."""
        found: dict[int, list[int]] = {i: [] for i in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operand_ids):
                found[operand].append(instruction.id)
        return found

    @property
    def parameters(self) -> dict[int, int]:
        """Parameter number -> id."""
        return {i.parameter_number: i.id for i in self.instructions.values() if i.opcode == "parameter"}

    def operands(self, instruction) -> list:
        return [self.instructions[i] for i in instruction.operand_ids]

    def trips(self, loop) -> int:
        """The trips of a while instruction: as XLA has found, or of a counter that goes up by 1; else 1.

        On CUDA XLA looks for them after the hook.
        """
        try:
            return int(json.loads(loop.backend_config)["known_trip_count"]["n"])
        except (ValueError, KeyError, TypeError):
            return self._counted(loop) or 1

    def _counted(self, loop) -> int | None:
        condition, body = (self.module.computation(id) for id in _condition_first(self.module, loop))
        test = condition.root
        if test.opcode != "compare" or test.comparison_direction != "LT":
            return None
        counter, limit = condition.operands(test)
        if counter.opcode != "get-tuple-element" or body.root.opcode != "tuple":
            return None
        place, start = counter.tuple_index, self.instructions[loop.operand_ids[0]]
        step = body.instructions[body.root.operand_ids[place]]
        if step.opcode != "add" or start.opcode != "tuple":
            return None
        numbers = [_number(i) for i in (limit, self.instructions[start.operand_ids[place]])]
        by_one = any(_number(i) == 1 for i in body.operands(step))
        old = any(i.opcode == "get-tuple-element" and i.tuple_index == place for i in body.operands(step))
        return numbers[0] - numbers[1] if by_one and old and None not in numbers else None

    def add(self, before, like=None, *, id: int | None = None):
        """A new instruction, a copy of `like`, in front of the instruction `before`.

        id: of an instruction that it takes the place of; without one it gets a fresh id.
        """
        new = self.proto.instructions.add()
        if like is not None:
            new.CopyFrom(like)
        if id is None:
            id = (self.proto.id << LOCAL_BITS) | self._next
            self._next += 1
        new.id = id
        self._added += 1
        place = self._place[before.id if hasattr(before, "id") else before][0]
        self.instructions[new.id] = new
        self._place[new.id] = (place, self._added - 1_000_000_000)
        return new

    def make(self, before, opcode: str, shape, operands: Sequence[int], *, like, name: str = ""):
        """A new instruction of this opcode and shape, which stands where `like` did in the program's source."""
        new = self.add(before)
        new.opcode, new.name = opcode, self.module.fresh_name(name or opcode)
        new.shape.CopyFrom(shape)
        new.operand_ids.extend(operands)
        new.metadata.stack_frame_id = like.metadata.stack_frame_id
        return new

    def delete(self, instruction) -> None:
        """Takes an instruction out. What read it must read another by the time of `finish`."""
        instruction.opcode = ""
        self._deleted = True
        if self.instructions.get(instruction.id) is instruction:
            del self.instructions[instruction.id]

    def take_over(self, old, new) -> None:
        """Gives `new` the id, the name and thereby the users of `old`, which goes."""
        old_id, old_name = old.id, old.name
        self.delete(old)
        place = self._place[new.id]
        del self.instructions[new.id], self._place[new.id]
        new.id, new.name = old_id, old_name
        self.instructions[old_id], self._place[old_id] = new, place

    def replace_uses(self, old: int, new: int) -> None:
        """Lets every reader of `old` read `new`."""
        for instruction in self.instructions.values():
            for n, operand in enumerate(instruction.operand_ids):
                if operand == old:
                    instruction.operand_ids[n] = new
        if self.proto.root_id == old:
            self.proto.root_id = new

    def in_order(self) -> list:
        """The instructions as they stand now."""
        return sorted(self.instructions.values(), key=lambda i: self._place[i.id])

    def reorder(self) -> None:
        """Puts operands before their users again, the rest as near as can be to where it stands."""
        done: dict[int, tuple[int, int]] = {}
        begun: set[int] = set()
        for last in self.in_order():
            waiting = [last.id]
            while waiting:
                at = self.instructions[waiting[-1]]
                needs = [i for i in (*at.operand_ids, *at.control_predecessor_ids) if i not in done]
                if not needs:
                    done.setdefault(waiting.pop(), (len(done), 0))
                elif at.id in begun:
                    raise HloFormError(f"{self.module.name}: {at.name} needs its own result")
                begun.add(at.id)
                waiting += needs
        self._place = done

    def finish(self) -> None:
        """Puts new instructions in their places and drops those that are deleted."""
        if not self._added and not self._deleted:
            return
        instructions = self.proto.instructions
        for n in reversed(range(len(instructions))):
            if not instructions[n].opcode:
                del instructions[n]
        instructions.sort(key=lambda i: self._place[i.id])


class Module:
    """A module, parsed from bytes. `serialize` gives it back."""

    def __init__(self, serialized: bytes):
        self.proto = ModuleProto.FromString(serialized)
        self._wrapped: dict[int, Computation] = {}
        self._order = {c.id: (n, 0) for n, c in enumerate(self.proto.computations)}
        self._protos = {c.id: c for c in self.proto.computations}
        self.next_computation = max(self._protos) + 1
        self._names: dict[str, int] = {}  # stem -> the last number given
        for named in itertools.chain(self.proto.computations, *(c.instructions for c in self.proto.computations)):
            if (match := OURS.fullmatch(named.name)) is not None:
                self._names[match[1]] = max(int(match[2]), self._names.get(match[1], -1))
        self._channel = max((i.channel_id for c in self.proto.computations for i in c.instructions), default=0)

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def entry(self) -> Computation:
        return self.computation(self.proto.entry_computation_id)

    def computation(self, id: int) -> Computation:
        if id not in self._wrapped:
            self._wrapped[id] = Computation(self, self._protos[id])
        return self._wrapped[id]

    def bodies(self) -> list[Computation]:
        """All computations but the insides of fusions, as they are now."""
        return [self.computation(c.id) for c in list(self.proto.computations) if not c.is_fusion_computation]

    def fresh_channel(self) -> int:
        self._channel += 1
        return self._channel

    def fresh_name(self, stem: str) -> str:
        """A name that nothing in the module has: the package's own suffix, with a number."""
        stem = match[1] if (match := OURS.fullmatch(stem)) else stem
        self._names[stem] = self._names.get(stem, -1) + 1
        return f"{stem}.taco{self._names[stem]}"

    def add_computation(self, like, caller: Computation):
        """A copy of computation `like` with a fresh id and name, in front of the caller's. Returns the proto.

        Ids of its instructions move along; ids of what they call stay, for the caller of this to change.
        """
        new = self.proto.computations.add()
        new.CopyFrom(like)
        new.id = self.next_computation
        self.next_computation += 1
        new.name = self.fresh_name(like.name)
        base, mask = new.id << LOCAL_BITS, (1 << LOCAL_BITS) - 1
        new.root_id = base | (new.root_id & mask)
        for instruction in new.instructions:
            instruction.id = base | (instruction.id & mask)
            instruction.name = self.fresh_name(instruction.name)
            instruction.operand_ids[:] = [base | (i & mask) for i in instruction.operand_ids]
            if instruction.control_predecessor_ids:
                instruction.control_predecessor_ids[:] = [
                    base | (i & mask) for i in instruction.control_predecessor_ids
                ]
        self._protos[new.id] = new
        # What it calls is added after it, and must come before.
        self._order[new.id] = (self._order[caller.proto.id][0], -new.id)
        return new

    @cached_property
    def callers(self) -> dict[int, list[tuple[Computation, int]]]:
        """Computation id -> (calling computation, id of the calling instruction), as the module came in."""
        found: dict[int, list[tuple[Computation, int]]] = {}
        for proto in self.proto.computations:
            for instruction in proto.instructions:
                for called in instruction.called_computation_ids:
                    found.setdefault(called, []).append((self.computation(proto.id), instruction.id))
        return found

    def runs(self, computation: Computation) -> int:
        """Returns how often a computation runs in one run of the program, as far as XLA knows the trips of loops."""
        if computation.proto.id == self.proto.entry_computation_id:
            return 1
        total = 0
        for caller, id in self.callers.get(computation.proto.id, ()):
            instruction = caller.instructions[id]
            total += self.runs(caller) * (caller.trips(instruction) if instruction.opcode == "while" else 1)
        return max(total, 1)

    def serialize(self) -> bytes:
        for computation in self._wrapped.values():
            computation.finish()
        self.proto.computations.sort(key=lambda c: self._order[c.id])
        return self.proto.SerializeToString()


def _condition_first(module: Module, loop) -> list[int]:
    """Ids of a loop's condition and body: the condition returns a truth value."""
    return sorted(loop.called_computation_ids, key=lambda id: module.computation(id).root.shape.element_type != PRED)


def _number(instruction) -> int | None:
    """The value of a scalar integer constant."""
    literal = instruction.literal
    values = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
    return values[0] if instruction.opcode == "constant" and len(values) == 1 else None
