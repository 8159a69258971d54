"""A plan as a file: the codec of every site or collective, what was measured there, and of which model.

    plan = read("plan.json")            # a PlanFile; ConfigError in one line for what is none
    plan.check_model(shape_of(config), site_names)
    plan.plan()                         # the `taco_jax.compression.Plan` that it says
    write(plan, "other.json")

`python -m taco_jax.calibrate` writes such files (docs/plans.md has the keys). A file is one JSON object:

    format, version     "taco_jax plan", 1
    made                how it came about: command, taco_jax, date, data, tokens, budget
    model               {"shape": fields of the ModelConfig, "sites": names}; null for a program that is not ours
    sites               name -> forward, backward, error_feedback, forward_measured, backward_measured
    collectives         of programs that are not ours: axis, operation, pattern, codec, snr_db, elements
    arrangement         null, or {"order": a permutation of the residual dimension}
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from taco_jax.codec import as_codec
from taco_jax.compression.compression import Compression, Plan
from taco_jax.errors import ConfigError, did_you_mean

FORMAT, VERSION = "taco_jax plan", 1
MOST = sys.float_info.max
AGAIN = "write it anew with python -m taco_jax.calibrate"
# Fields of a ModelConfig that change no message and no value that a site sends.
_NO_SHAPE = ("init_std", "max_length")
_SITE_KEYS = ("forward", "backward", "error_feedback", "forward_measured", "backward_measured")
_COLLECTIVE_KEYS = ("axis", "operation", "pattern", "codec", "snr_db", "elements")
_KEYS = ("format", "version", "made", "model", "sites", "collectives", "arrangement")


@dataclasses.dataclass(frozen=True)
class SitePlan:
    """One site: its codecs as texts ("none" is exact), and what was measured there.

    forward_measured, backward_measured: snr_db, kurtosis, outlying_channels, bits (an element), elements, sensitivity
    and guard_snr_db (the bound of the guard), as far as they were measured; None for a direction that sends nothing.
    """

    forward: str = "none"
    backward: str = "none"
    error_feedback: bool = False
    forward_measured: Mapping[str, float] | None = None
    backward_measured: Mapping[str, float] | None = None

    def compression(self, base: Compression | None = None) -> Compression:
        """Returns the site's codecs, with the other options of `base` (by default those of `Compression`)."""
        feedback = self.error_feedback and not as_codec(self.forward).exact
        changes = {"forward": self.forward, "backward": self.backward, "error_feedback": feedback}
        return dataclasses.replace(base if base is not None else Compression(), **changes)


@dataclasses.dataclass(frozen=True)
class CollectivePlan:
    """One kind of collective in a program that is not ours, by mesh axis, operation and a pattern of its op_name."""

    axis: str
    operation: str
    pattern: str
    codec: str
    snr_db: float | None = None
    elements: int | None = None


@dataclasses.dataclass(frozen=True)
class PlanFile:
    """A plan and where it comes from. Fields are the keys of the file; `source` is the path that error lines name."""

    sites: Mapping[str, SitePlan] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] | None = None
    made: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    collectives: tuple[CollectivePlan, ...] = ()
    arrangement: Mapping[str, Any] | None = None
    source: str = dataclasses.field(default="plan", compare=False)

    def rules(self, base: Compression | None = None) -> dict[str, Compression]:
        """Returns the sites' compressions as rules of a `taco_jax.compression.Plan`."""
        return {name: site.compression(base) for name, site in self.sites.items()}

    def plan(self, base: Compression | None = None) -> Plan:
        """Returns the plan of the sites; what is no codec (link, min_bytes...) is as in `base`."""
        return Plan(self.rules(base))

    def check_model(self, shape: Mapping[str, Any], sites: Iterable[str] | None = None) -> None:
        """Raises ConfigError for a plan of another model, or of other sites (not looked at where None).

        shape: as `shape_of` returns. A field that only one of both has is not compared.
        """
        if self.model is None:
            rule = "is of a program that is not taco_jax's own; give it to taco_jax.compressed, or calibrate this model"
            raise ConfigError(f"{self.source}: {rule}")
        planned = self.model["shape"]
        for key in (key for key in planned if key in shape):
            if planned[key] != shape[key]:
                there = f"{key} is {planned[key]!r} in the plan and {shape[key]!r} in this model"
                raise ConfigError(f"{self.source}: is a plan of another model: {there}; {AGAIN}")
        if sites is None:
            return
        now, then = list(sites), set(self.model["sites"])
        gone, new = sorted(then - set(now)), [name for name in now if name not in then]
        if gone or new:
            parts = [f"{what} {_some(names)}" for what, names in (("gone:", gone), ("new:", new)) if names]
            raise ConfigError(f"{self.source}: its model's sites have changed ({'; '.join(parts)}); {AGAIN}")

    def as_dict(self) -> dict[str, Any]:
        """Returns the file's JSON object, of plain values."""
        sites = {name: dataclasses.asdict(site) for name, site in self.sites.items()}
        collectives = [dataclasses.asdict(collective) for collective in self.collectives]
        values = {"format": FORMAT, "version": VERSION, "made": dict(self.made), "model": self.model, "sites": sites}
        return json.loads(json.dumps(values | {"collectives": collectives, "arrangement": self.arrangement}))


def shape_of(config: Any) -> dict[str, Any]:
    """Returns the fields of a ModelConfig that a plan is bound to, as JSON has them."""
    fields = dataclasses.asdict(config)
    return json.loads(json.dumps({key: value for key, value in fields.items() if key not in _NO_SHAPE}))


def is_plan_path(text: object) -> bool:
    """Returns whether a text is the path of a plan's file rather than a codec."""
    return isinstance(text, str) and text.endswith(".json")


def read(path: str | os.PathLike) -> PlanFile:
    """Returns the plan of a file.

    Raises:
      ConfigError: a file that cannot be read, is no plan of this version, or has a codec that there is not.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; {AGAIN} --out {path}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON ({error}); {AGAIN}") from None
    return of_dict(content, str(path))


def write(plan: PlanFile, path: str | os.PathLike) -> None:
    """Writes a plan. The file is whole at any time: the old one, or the new one.

    Raises:
      ConfigError: a folder that cannot be written into.
    """
    text = json.dumps(of_dict(plan.as_dict(), plan.source).as_dict(), indent=1, allow_nan=False) + "\n"
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None


def of_dict(content: object, source: str = "plan") -> PlanFile:
    """Returns the plan of a file's JSON object; `source` begins the line of an error.

    Raises:
      ConfigError: as `read`.
    """
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{source}: is no plan: lacks 'format': {FORMAT!r}; {AGAIN}")
    if content.get("version") != VERSION:
        raise ConfigError(f"{source}: version={content.get('version')!r}: must be {VERSION}; {AGAIN}")
    _keys(content, _KEYS, ("sites",), source)
    made, model = content.get("made") or {}, content.get("model")
    _require(isinstance(made, dict), source, "made", made, "must be an object")
    if model is not None:
        whole = isinstance(model, dict) and isinstance(model.get("shape"), dict) and _texts(model.get("sites"))
        _require(whole, source, "model", model, "must be null, or have an object 'shape' and a list 'sites' of names")
    _require(isinstance(content["sites"], dict), source, "sites", content["sites"], "must be an object")
    sites = {name: _site(f"{source}: site {name!r}", value) for name, value in content["sites"].items()}
    if model is not None and (unknown := [name for name in sites if name not in model["sites"]]):
        hint = did_you_mean(unknown[0], model["sites"])
        raise ConfigError(f"{source}: site {unknown[0]!r}: is none of the model's sites; {hint}")
    listed = content.get("collectives") or []
    _require(isinstance(listed, list), source, "collectives", listed, "must be a list")
    collectives = tuple(_collective(f"{source}: collectives[{i}]", value) for i, value in enumerate(listed))
    arrangement = content.get("arrangement")
    if arrangement is not None:
        _check_arrangement(arrangement, model, source)
    return PlanFile(sites, model, made, collectives, arrangement=arrangement, source=source)


def kept(path: str | os.PathLike) -> dict[str, str]:
    """Returns {path: content}, what a run's settings hold of a plan's file, so that they need it no more.

    Raises:
      ConfigError: as `read`.
    """
    return {str(path): json.dumps(read(path).as_dict(), separators=(",", ":"))}


def of_kept(rules: Mapping[str, str]) -> PlanFile | None:
    """Returns the plan that `kept` made, None for a mapping of patterns to codecs.

    Raises:
      ConfigError: as `read`; a plan's file beside patterns.
    """
    paths = [key for key in rules if is_plan_path(key)] if isinstance(rules, Mapping) else []
    if not paths:
        return None
    if len(rules) > 1:
        other = next(key for key in rules if key != paths[0])
        raise ConfigError(f"plan {paths[0]}: is a whole plan; leave {other!r} out, or write that codec into the file")
    try:
        content = json.loads(rules[paths[0]])
    except (TypeError, ValueError):
        raise ConfigError(f"plan {paths[0]}: must hold a plan's content; give the file by its path") from None
    return of_dict(content, paths[0])


def feeds_back(rules: Mapping[str, str]) -> bool:
    """Returns whether a kept plan has sites with error feedback."""
    planned = of_kept(rules)
    return planned is not None and any(site.error_feedback for site in planned.sites.values())


def _site(key: str, value: object) -> SitePlan:
    _keys(value, _SITE_KEYS, ("forward", "backward"), key)
    for direction in ("forward", "backward"):
        _codec(key, direction, value[direction])
        measured = value.get(f"{direction}_measured")
        if measured is not None:
            numbers = isinstance(measured, dict) and all(_number(number) for number in measured.values())
            _require(numbers, key, f"{direction}_measured", measured, "must be null, or an object of finite numbers")
    feedback = value.get("error_feedback", False)
    _require(isinstance(feedback, bool), key, "error_feedback", feedback, "must be true or false")
    return SitePlan(**value)


def _collective(key: str, value: object) -> CollectivePlan:
    _keys(value, _COLLECTIVE_KEYS, ("axis", "operation", "pattern", "codec"), key)
    for name in ("axis", "operation", "pattern"):
        _require(isinstance(value[name], str), key, name, value[name], "must be a text")
    _codec(key, "codec", value["codec"])
    for name in ("snr_db", "elements"):
        _require(value.get(name) is None or _number(value[name]), key, name, value.get(name), "must be null or finite")
    return CollectivePlan(**value)


def _check_arrangement(arrangement: object, model: Mapping[str, Any] | None, source: str) -> None:
    order = arrangement.get("order") if isinstance(arrangement, dict) else None
    integers = isinstance(order, list) and all(type(channel) is int for channel in order)
    whole = integers and sorted(order) == list(range(len(order)))
    rule = "must be null, or have 'order', a permutation of 0 to d_model - 1"
    _require(whole, source, "arrangement", arrangement, rule)
    width = (model or {"shape": {}})["shape"].get("d_model", len(order))
    _require(len(order) == width, source, "arrangement.order", f"{len(order)} integers", f"must be d_model={width}")


def _codec(source: str, key: str, text: object) -> None:
    _require(isinstance(text, str), source, key, text, "must be a codec as a text, such as 'int8h', or 'none'")
    try:
        as_codec(text, key)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _keys(value: object, known: tuple[str, ...], needed: tuple[str, ...], source: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {_short(value)}: must be an object with the keys {', '.join(needed)}")
    for key in value:
        if key not in known:
            raise ConfigError(f"{source}: no such key {key!r}; {did_you_mean(key, known)}")
    for key in needed:
        if key not in value:
            raise ConfigError(f"{source}: lacks the key {key!r}; {AGAIN}")


def _require(fits: bool, source: str, key: str, value: object, rule: str) -> None:
    if not fits:
        raise ConfigError(f"{source}: {key}={_short(value)}: {rule}")


def _number(value: object) -> bool:
    # A whole number that no float holds is as little use as an infinite one.
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST <= value <= MOST


def _texts(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
