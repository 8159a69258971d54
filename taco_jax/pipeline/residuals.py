"""A function's forward pass and its backward pass apart, with what lies between them in arrays of the caller's.

`jax.vjp` inside of `lax.scan` inside of `lax.scan` stacks what a backward pass needs twice: the inner loop fills an
array of its own, which the outer one copies into a larger one, and both are filled with zeros before. Such copies move
several times what a stage saves. `Split` names the residuals one by one, so that loops can write each once, in its
place in one array for all rounds, and read it there.

    split = Split(f, c, w, k)
    y, saved = split.forward(c, w, k, fixed)                    fixed = split.fixed(w, k), once for all rounds
    ct_c, ct_w = split.backward(saved, w, k, fixed, ct_y)

Of the residuals, `saved` holds only what depends on c. What is w or k itself, or made of these and small (weights as
cast for products), is handed in again; what depends on neither is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import partial_eval

# What a variable depends on: constants; what the function closes over; w and k; c.
_NOTHING, _CLOSURE, _FIXED, _MOVING = range(4)


class Split:
    """f(c, w, k) -> y, a tree like c's, and its derivative with respect to c and w.

    Made of values, or of tracers of the same types, inside of the trace in which it is used: f may close over tracers.
    Two of one function with operands of equal types agree on `saved` and `fixed`.

    hoist: let `fixed` hold what depends on w and k alone. Else every forward pass computes that again.
    """

    def __init__(self, f: Callable[[Any, Any, Any], Any], c: Any, w: Any, k: Any = (), hoist: bool = False):
        def run(c, w, k):
            y, pull = jax.vjp(lambda c, w: f(c, w, k), c, w)
            residuals, self._pull = jax.tree.flatten(pull)
            y, self._result = jax.tree.flatten(y)
            self._results = len(y)
            return y, residuals

        closed = jax.make_jaxpr(run)(c, w, k)
        self._jaxpr, self._closure = closed.jaxpr, list(closed.consts)
        moving = len(jax.tree.leaves(c))
        self._c, self._wk = self._jaxpr.invars[:moving], self._jaxpr.invars[moving:]
        self._residuals = self._jaxpr.outvars[self._results :]
        self._sort(hoist)

    def _sort(self, hoist: bool) -> None:
        """Finds what each equation depends on, and which values go from one program to another."""
        on = dict.fromkeys(self._c, _MOVING) | dict.fromkeys(self._wk, _FIXED)
        # A value that is no tracer is the same in every round.
        for var, value in zip(self._jaxpr.constvars, self._closure, strict=True):
            on[var] = _CLOSURE if isinstance(value, jax.core.Tracer) else _NOTHING
        self._equations: dict[int, list] = {_NOTHING: [], _CLOSURE: [], _FIXED: [], _MOVING: []}
        for eqn in self._jaxpr.eqns:
            kinds = {on[v] for v in eqn.invars if not isinstance(v, Literal)}
            kind = max(kinds, default=_NOTHING)
            # What is larger than all that it is made of is made again where it is used: a broadcast, most often.
            grows = sum(map(_bytes, eqn.outvars)) > sum(map(_bytes, eqn.invars))
            if kind == _FIXED and (not hoist or eqn.effects or grows or _CLOSURE in kinds):
                kind = _MOVING
            on |= dict.fromkeys(eqn.outvars, kind)
            self._equations[kind].append(eqn)
        used = [v for eqn in self._equations[_MOVING] for v in eqn.invars] + self._jaxpr.outvars
        made = {v for eqn in self._equations[_FIXED] for v in eqn.outvars}
        self._fixed = _unique(v for v in used if not isinstance(v, Literal) and v in made)
        nested = {v for eqn in self._equations[_MOVING] if any(jaxprs_in_params(eqn.params)) for v in eqn.outvars}
        moves = lambda v: on[v] == _MOVING and not (v in nested and self._is_made_of_closure(v))
        self._saved = _unique(v for v in self._residuals if not isinstance(v, Literal) and moves(v))
        known = {*self._wk, *self._fixed, *self._saved, *self._jaxpr.constvars}
        self._again = _unique(v for v in self._residuals if not isinstance(v, Literal) and v not in known)

    @property
    def saved(self) -> list[jax.core.ShapedArray]:
        """The types of what `forward` saves."""
        return [v.aval for v in self._saved]

    def fixed(self, w: Any, k: Any) -> list[jax.Array]:
        """Returns what rounds with this w and k have in common."""
        free, fixed = self._equations[_NOTHING], self._equations[_FIXED]
        return self._run([*free, *fixed], self._wk, jax.tree.leaves((w, k)), self._fixed)

    def forward(self, c: Any, w: Any, k: Any, fixed: Sequence[jax.Array]) -> tuple[Any, list[jax.Array]]:
        """Returns (y, what the backward pass needs besides w, k and fixed)."""
        names = [*self._c, *self._wk, *self._fixed]
        fixed_equations = set(map(id, self._equations[_FIXED]))
        equations = [eqn for eqn in self._jaxpr.eqns if id(eqn) not in fixed_equations]
        outputs = [*self._jaxpr.outvars[: self._results], *self._saved]
        values = self._run(equations, names, [*jax.tree.leaves((c, w, k)), *fixed], outputs)
        return jax.tree.unflatten(self._result, values[: self._results]), values[self._results :]

    def backward(self, saved: Sequence[jax.Array], w: Any, k: Any, fixed: Sequence[jax.Array], ct: Any) -> Any:
        """Returns the cotangents of c and w for y's."""
        again = self._from_closure()
        names = [*self._jaxpr.constvars, *self._wk, *self._fixed, *self._saved, *self._again]
        values = [*self._closure, *jax.tree.leaves((w, k)), *fixed, *saved, *again]
        known = dict(zip(names, values, strict=True))
        residuals = [v.val if isinstance(v, Literal) else known[v] for v in self._residuals]
        return jax.tree.unflatten(self._pull, residuals)(ct)

    def _is_made_of_closure(self, v) -> bool:
        """Returns whether an output of an equation that holds others (a jitted function) needs neither c, w nor k."""
        _, used = partial_eval.dce_jaxpr(self._open([v]), [True])
        return not any(used[len(self._closure) :])

    def _from_closure(self) -> list[jax.Array]:
        """The residuals that need neither c, w nor k, made again."""
        part, used = partial_eval.dce_jaxpr(self._open(self._again), [True] * len(self._again))
        values = [value for value, needed in zip(self._closure, used) if needed]
        return jaxpr_as_fun(ClosedJaxpr(part, []))(*values)

    def _open(self, outputs):
        """The jaxpr with its closure as operands."""
        names = [*self._jaxpr.constvars, *self._c, *self._wk]
        return self._jaxpr.replace(constvars=[], invars=names, outvars=list(outputs))

    def _run(self, equations, names, values, outputs) -> list[jax.Array]:
        """The outputs of these equations, whose inputs are the closure and `names`."""
        names, values = [*self._jaxpr.constvars, *names], [*self._closure, *values]
        part = self._jaxpr.replace(constvars=[], invars=names, outvars=list(outputs), eqns=list(equations))
        return jaxpr_as_fun(ClosedJaxpr(part, []))(*values)


def _bytes(v: Any) -> int:
    return math.prod(v.aval.shape) * getattr(v.aval.dtype, "itemsize", 4)


def _unique(variables) -> list:
    return list(dict.fromkeys(variables))
