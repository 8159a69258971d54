"""LoRA (arXiv 2106.09685): matrices that stay as they are, each with the product of two small ones that are trained.

    y = x W + (alpha / rank) (x A) B         A [in, rank] drawn, B [rank, out] zeros: the first y is that of W

The trained tree has, below the names of the decoder's, {"lora_a": A, "lora_b": B} for every target, stacked over layers
as all is. `join` puts both trees together: a target's kernel is then an `Adapted`, which the products of
`taco_jax.models.projections` know. A lies on the mesh as the rows of W do, and B as its columns:

| layer | A | B | messages |
|---|---|---|---|
| column-parallel | whole on every rank | cut by columns | the gradient of A, once a step, float32 |
| row-parallel | cut by rows | whole on every rank | the gradient of B, once a step, float32 |

x A B joins this rank's term of a row-parallel product before its sum, and the gradient of a column-parallel layer's
input before that one, so the layers' own messages are as many and as long as without adapters.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from taco_jax.config.lora import MATRICES, LoraConfig, matrices
from taco_jax.models.config import ModelConfig
from taco_jax.models.run_config import use_replicated

A, B = "lora_a", "lora_b"


class Adapted(NamedTuple):
    """A kernel [in, out] that no gradient reaches, with its adapter: a [in, rank], b [rank, out]."""

    kernel: Any
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which matrices have adapters, in our names, of what rank, and how often these count."""

    rank: int
    scale: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, lora: LoraConfig, model: ModelConfig) -> Adapters | None:
        """Returns those of a model's run; None where its own weights are trained."""
        if lora.rank is None:
            return None
        has = matrices(model)
        return cls(lora.rank, lora.scale, tuple(name for name in lora.named if name in has))

    def init(self, model: ModelConfig, key: jax.Array) -> dict[str, Any]:
        """New adapters, float32, of global sizes: A uniform within 1 / sqrt(in), as PEFT draws it, B zeros.

        A target's values depend neither on the mesh nor on the other targets.
        """
        sizes, layers = matrices(model), model.n_layers

        def adapter(name: str) -> dict[str, jax.Array]:
            rows, columns = sizes[name]
            limit, own = 1 / math.sqrt(rows), jax.random.fold_in(key, MATRICES.index(name))
            a = jax.random.uniform(own, (layers, rows, self.rank), jnp.float32, -limit, limit)
            return {A: a, B: jnp.zeros((layers, self.rank, columns), jnp.float32)}

        return self._tree(adapter)

    def specs(self, of_params: Mapping[str, Any]) -> dict[str, Any]:
        """The PartitionSpecs of the tree of `init`, from those of the decoder's parameters."""

        def adapter(name: str) -> dict[str, P]:
            part, matrix = name.split("/")
            rows, columns = _cut(of_params["layers"][part][matrix]["kernel"])
            return {A: P(None, rows, None), B: P(None, None, columns)}

        return self._tree(adapter)

    def count(self, model: ModelConfig) -> int:
        """Returns how many parameters the adapters have."""
        sizes = matrices(model)
        return model.n_layers * self.rank * sum(sum(sizes[name]) for name in self.targets)

    def _tree(self, adapter: Callable[[str], Any]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name in self.targets:
            part, matrix = name.split("/")
            tree.setdefault(part, {})[matrix] = adapter(name)
        return {"layers": tree}


def join(base: Mapping[str, Any] | None, trained: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the decoder's parameters: `base`, its targets' kernels `Adapted`; of no base, `trained` alone."""
    if not base:
        return trained
    if A in trained:
        return dict(base, kernel=Adapted(base["kernel"], trained[A], trained[B]))
    return dict(base, **{name: join(base[name], below) for name, below in trained.items()})


def split(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (trained, base) of what `join` has made, whatever has been done with the leaves since."""
    trained, base = {}, {}
    for name, below in params.items():
        if isinstance(below, Adapted):
            base[name] = below.kernel
            trained |= {A: below.a, B: below.b}
        elif isinstance(below, Mapping):
            of_it, base[name] = split(below)
            trained |= {name: of_it} if of_it else {}
        else:
            base[name] = below
    return trained, base


def use_replicated_adapter(kernel: Adapted, spec: P, axis: str, site: str) -> Adapted:
    """`use_replicated` of the one of A and B that every rank of `axis` holds; of both where the kernel is replicated.

    spec: of the stacked kernel, which is left as it is.
    """
    rows, columns = _cut(spec)
    a = kernel.a if rows else use_replicated(kernel.a, axis, f"{site}/{A}")
    b = kernel.b if columns else use_replicated(kernel.b, axis, f"{site}/{B}")
    return kernel._replace(a=a, b=b)


def merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """The stacked kernel that computes what kernel and adapter do, float32."""
    return kernel + scale * jnp.einsum("...dr,...rf->...df", a, b, precision="highest")


def _cut(spec: P) -> tuple[Any, Any]:
    """Mesh axes of the rows and of the columns of a stacked kernel."""
    _, rows, columns = (*spec, None, None, None)[:3]
    return rows, columns
