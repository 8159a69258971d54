"""The plan: which collectives, by mesh axis, operation and op_name, go in which codec."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import numbers
import os
from collections import Counter
from collections.abc import Iterable, Mapping

from taco_jax.codec import Codec, as_codec
from taco_jax.compression import plan_file
from taco_jax.compression.compression import Compression, as_compression
from taco_jax.errors import ConfigError, did_you_mean

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute")
SPELLINGS = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "ppermute": "collective_permute"}
FORM = (
    'a plan is {axis: codec}, or {axis: {operation or pattern of op_name: codec}}, such as {"tensor": "int8h"}; or '
    'the path of a plan file, such as "plan.json"'
)
MEASURE = "python -m taco_jax.run --calibrate plan.json -- ..."


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line of a plan.

    Attributes:
      axes: the mesh axes, one or several that are summed over together.
      operation: one of `OPERATIONS`, or None: all.
      pattern: shell-style, of the whole op_name, or None: all. "" is of collectives without a name.
      compression: None leaves the collective exact.
    """

    axes: tuple[str, ...]
    operation: str | None
    pattern: str | None
    compression: Compression | None

    @property
    def text(self) -> str:
        """The rule's left side as `--compress` takes it: "fsdp/reduce_scatter"."""
        return "/".join(filter(None, ("+".join(self.axes), self.operation, self.pattern)))

    def matches(self, operation: str, op_name: str) -> bool:
        if self.operation not in (None, operation):
            return False
        return self.pattern is None or fnmatch.fnmatchcase(op_name, self.pattern)

    @property
    def generality(self) -> tuple[bool, bool]:
        """The order of rules: those of op_name, of an operation, of an axis."""
        return self.pattern is None, self.operation is None


@dataclasses.dataclass(frozen=True)
class DropInPlan:
    """Rules, the most special first: those of op_name, of an operation, of an axis; else in the order of the mapping.

    min_bytes: of collectives whose own `Compression` leaves it open; None: as tuned for codec, ranks and link.
    source: the file that it is from, None for a mapping. A file has a line for each collective of the run that it was
    measured in: those that match nothing now are listed in the report, and are no error.
    """

    rules: tuple[Rule, ...]
    min_bytes: int | None = None
    source: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def axes(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(rule.axes for rule in self.rules))

    @property
    def digest(self) -> str:
        """Equal for equal plans, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def parse_plan(plan, min_bytes: int | None = None) -> DropInPlan:
    """The plan of a mapping, or of a plan file (its path).

    Raises:
      TypeError, ValueError: in one line, with the axis, the value and what would work.
    """
    if isinstance(plan, os.PathLike) or plan_file.is_plan_path(plan):
        try:
            file = plan_file.read(plan)
        except ConfigError as error:
            what, again, _ = str(error).partition(f"; {plan_file.AGAIN}")
            raise ConfigError(f"{what}; measure one: {MEASURE}" if again else what) from None
        return _of_file(file, min_bytes)
    if not isinstance(plan, Mapping) or not plan:
        raise TypeError(f"plan={plan!r}: {FORM}")
    rules: list[Rule] = []
    for key, value in plan.items():
        axes = _axes(key)
        for operation, pattern, codec in _lines(axes, value):
            rule = Rule(axes, operation, pattern, None)
            rules.append(dataclasses.replace(rule, compression=_compression(f"plan: {rule.text}", codec)))
    return _of_rules(rules, min_bytes, "plan")


def _of_file(file: plan_file.PlanFile, min_bytes: int | None) -> DropInPlan:
    """The plan of a file's collectives. Raises ConfigError for a file that has none, or lines that cannot be."""
    source = file.source
    if not file.collectives:
        what = "is a plan for the sites of a model of taco_jax" if file.sites else "names no collective"
        take = " take it with --compression.plan (trainer) or --compression (inference);" if file.sites else ""
        raise ConfigError(f"{source}: {what};{take} for a program that is not ours measure one: {MEASURE}")
    rules = []
    for n, line in enumerate(file.collectives):
        place = f"{source}: collectives[{n}]"
        operation = None if line.operation == "*" else _operation(line.operation)
        if operation is None and line.operation != "*":
            hint = did_you_mean(line.operation, (*OPERATIONS, "*"))
            raise ConfigError(f"{place}: operation={line.operation!r}: is no operation; {hint}")
        try:
            rule = Rule(_axes(line.axis), operation, None if line.pattern == "*" else line.pattern, None)
            rules.append(dataclasses.replace(rule, compression=_compression(f"{place}: codec", line.codec)))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error).replace("plan: ", f"{place}: ", 1)) from None
    try:
        return dataclasses.replace(_of_rules(rules, min_bytes, source), source=source)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _of_rules(rules: list[Rule], min_bytes: int | None, source: str) -> DropInPlan:
    places = Counter((frozenset(rule.axes), rule.operation, rule.pattern) for rule in rules)
    for rule in rules:
        if places[frozenset(rule.axes), rule.operation, rule.pattern] > 1:
            raise ValueError(f"{source}: {rule.text}: is given twice; name each axis, operation and pattern once")
    rules.sort(key=lambda rule: rule.generality)
    # Compression checks the number, and says what it must be.
    return DropInPlan(tuple(rules), Compression("none", min_bytes=min_bytes).min_bytes)


def parse_text(lines: Iterable[str]) -> dict:
    """The mapping of texts AXIS[+AXIS...][/OPERATION][/PATTERN]=CODEC. Raises ValueError in one line."""
    plan: dict = {}
    for line in lines:
        left, equals, codec = line.partition("=")
        axis, _, rest = left.partition("/")
        if not (equals and axis and codec):
            raise ValueError(f"{line!r}: must be AXIS=CODEC or AXIS/OPERATION=CODEC, such as tensor=int8h")
        lines_of_axis = plan.setdefault(axis, {})
        head, _, pattern = rest.partition("/")
        if _operation(head) is None:
            head, pattern = "", rest
        if (head, pattern) in lines_of_axis:
            raise ValueError(f"{line!r}: {left} is given twice")
        lines_of_axis[head, pattern] = codec
    return {axis: _nested(lines_of_axis) for axis, lines_of_axis in plan.items()}


def _nested(lines: Mapping[tuple[str, str], str]) -> dict:
    """{operation or pattern: codec or {pattern: codec}} of {(operation or "", pattern or ""): codec}."""
    nested: dict = {}
    for (operation, pattern), codec in lines.items():
        if operation:
            nested.setdefault(operation, {})[pattern or "*"] = codec
        else:
            nested[pattern or "*"] = codec
    return nested


def _axes(key) -> tuple[str, ...]:
    axes = tuple(key.split("+")) if isinstance(key, str) else key
    if not isinstance(axes, tuple) or not axes or not all(isinstance(a, str) and a for a in axes):
        raise TypeError(f"plan: axis {key!r}: must be the name of a mesh axis, or several, such as 'fsdp+tensor'")
    if len(set(axes)) < len(axes):
        raise ValueError(f"plan: axis {key!r}: names an axis twice; name each once, such as 'fsdp+tensor'")
    return axes


def parse_measured_axes(text: str) -> tuple[tuple[str, ...], str | None]:
    """(axes, operation or None) of a text AXIS[+AXIS...][/OPERATION]. Raises ConfigError in one line."""
    axis, slash, name = text.partition("/") if isinstance(text, str) else (text, "", "")
    try:
        axes = _axes(axis)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error).replace("plan: axis", "axes:")) from None
    operation = _operation(name)
    if slash and operation is None:
        raise ConfigError(f"axes: {text!r}: {name!r} is no operation; {did_you_mean(name, OPERATIONS)}")
    return axes, operation


def check_require(require, plan: DropInPlan) -> None:
    """Raises TypeError or ValueError, in one line, for what is no share of the plan's bytes."""
    shares = require if isinstance(require, Mapping) else {None: require}
    known = ["+".join(axes) for axes in plan.axes]
    for axes, share in shares.items():
        if axes is not None and axes not in known:
            raise ValueError(f"require: {axes!r}: is no axis of the plan; {did_you_mean(axes, known)}")
        entry = "require" if axes is None else f"require: {axes}"
        if share is None and axes is None:
            continue
        if not isinstance(share, numbers.Real) or isinstance(share, bool):
            raise TypeError(f"{entry}={share!r}: must be a share from 0 to 1, such as 0.95, or {{axis: share}}")
        if not 0 <= share <= 1:
            raise ValueError(f"{entry}={share:g}: must be a share from 0 to 1, such as 0.95")


def _operation(name: str) -> str | None:
    name = SPELLINGS.get(name, name).replace("-", "_")
    return name if name in OPERATIONS else None


def _lines(axes, value):
    """(operation, pattern, codec) of what stands under an axis."""
    if not isinstance(value, Mapping):
        yield None, None, value
        return
    entry = f"plan: {'+'.join(axes)}"
    for key, codec in _entries(entry, value):
        operation = _operation(key)
        if operation is None and not set(key) & set("*?[/"):
            raise ValueError(
                f"{entry}: {key!r} is no operation ({', '.join(OPERATIONS)}); "
                f"a pattern of op_name has wildcards, such as '*{key}*'"
            )
        if isinstance(codec, Mapping):
            if operation is None:
                raise TypeError(f"{entry}: {key!r}: a pattern has a codec, not a mapping")
            for pattern, inner in _entries(f"{entry}/{key}", codec):
                yield operation, None if pattern == "*" else pattern, inner
        else:
            yield operation, None if operation or key == "*" else key, codec


def _entries(entry: str, lines: Mapping) -> Iterable[tuple[str, object]]:
    """The items of a mapping within a plan. Raises TypeError or ValueError for one that names nothing."""
    if not lines:
        raise ValueError(f"{entry}: {lines!r}: names nothing; must have a codec, or {{operation or pattern: codec}}")
    for key in lines:
        if not isinstance(key, str) or not key:
            raise TypeError(f"{entry}: {key!r}: must be an operation or a pattern of op_name")
    return lines.items()


def _compression(text: str, value) -> Compression | None:
    """The compression of a line, whose name in errors is `text`.

    Raises ValueError for a codec that needs what a compiled program does not keep.
    """
    if not isinstance(value, str | Codec | Compression | None):
        raise TypeError(f"{text}: {value!r}: must be a codec's name, a Codec, a Compression, 'none' or None")
    try:
        compression = as_compression(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{text}: {error}") from None
    if compression is None:
        return None
    if compression.error_feedback or compression.backward_error_feedback:
        key = "error_feedback" if compression.error_feedback else "backward_error_feedback"
        raise ValueError(f"{text}: {key}=True keeps errors from step to step, and a program that is not "
                         "ours has no place for them; leave it out")  # fmt: skip
    for codec in (*compression.codecs, *filter(None, [compression.between])):
        if codec.rounding == "stochastic":
            raise ValueError(f"{text}: rounding='stochastic' needs a new key at every step; use 'nearest'")
        if codec.scale == "site" and not codec.exact:
            raise ValueError(f"{text}: scale='site' needs scales that are calibrated from step to step; use a "
                             "codec with scales of its own, such as 'int8h', 'e4m3h' or 'taco'")  # fmt: skip
    return compression


def directed(compression: Compression, direction: str) -> Compression:
    """The compression with the codec of this direction for both, to send every message."""
    codec = compression.codecs[direction == "backward"]
    return dataclasses.replace(compression, forward=codec, backward=codec, min_bytes=0)


def is_uncalibrated(compression: Compression | None) -> bool:
    """Returns whether a codec is meant in the form without a site scale that it has elsewhere."""
    relative = ("ue5m3", "e5m0", "e4m0")
    return compression is not None and any(as_codec(c).scale in relative for c in compression.codecs if not c.exact)
