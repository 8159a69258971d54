"""Products whose sum over a mesh axis is compressed: `taco_jax.dot`, and `taco_jax.dot_general` for Flax's own layers.

    row:    y = sum over the ranks of x[..., F/tp] kernel[F/tp, D]   forward: compressed all-reduce of y
    column: y[..., F/tp] = x[..., D] kernel[D, F/tp]                 backward: compressed all-reduce of dx

`CompressedDense` is a layer of its own; these are the same sums, run by `dense.apply`, for any dimension numbers. The
product is exact where the types say that the axis splits neither operand.

Dim letters: D features, F features split over the axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from taco_jax.codec import Codec, check_choice
from taco_jax.collectives import check_region
from taco_jax.compat import varying_axes
from taco_jax.compression.compression import Compression, as_integer
from taco_jax.compression.site_scales import SiteScales
from taco_jax.nn import dense
from taco_jax.nn.dense_layout import explicit_axes, other_axes, sequence_of, spec_of
from taco_jax.tensor_parallel import column_dense, row_dense

NAME = "dot_general"


@dataclasses.dataclass(frozen=True)
class Dims:
    """The dims of a product x kernel, counted from the front. Its result has batch, x_free and kernel_free."""

    x_summed: tuple[int, ...]
    kernel_summed: tuple[int, ...]
    x_batch: tuple[int, ...]
    kernel_batch: tuple[int, ...]
    x_free: tuple[int, ...]
    kernel_free: tuple[int, ...]

    @classmethod
    def of(cls, numbers, x, kernel) -> Dims:
        """The dims of `jax.lax.dot_general`'s dimension_numbers. Raises ValueError for sizes that do not agree."""
        (x_summed, kernel_summed), (x_batch, kernel_batch) = (
            tuple(tuple(int(d) % a.ndim for d in dims) for dims, a in zip(pair, (x, kernel), strict=True))
            for pair in numbers
        )
        free = lambda a, used: tuple(d for d in range(a.ndim) if d not in used)
        for ours, theirs in ((x_summed, kernel_summed), (x_batch, kernel_batch)):
            if [x.shape[d] for d in ours] != [kernel.shape[d] for d in theirs]:
                raise ValueError(
                    f"{NAME}: x has shape {x.shape}, the kernel {kernel.shape}: dims {ours} of x must have the "
                    f"sizes of dims {theirs} of the kernel"
                )
        x_free, kernel_free = free(x, x_summed + x_batch), free(kernel, kernel_summed + kernel_batch)
        return cls(x_summed, kernel_summed, x_batch, kernel_batch, x_free=x_free, kernel_free=kernel_free)

    @property
    def numbers(self):
        return (self.x_summed, self.kernel_summed), (self.x_batch, self.kernel_batch)

    def in_result(self, x_dim: int) -> int:
        """The dim of the result that a free dim of x becomes."""
        return len(self.x_batch) + self.x_free.index(x_dim)

    def is_matmul(self, x, kernel) -> bool:
        """Returns whether the product is x[..., D] kernel[D, F], as `jnp.matmul` has it."""
        return self.numbers == (((x.ndim - 1,), (0,)), ((), ())) and kernel.ndim == 2


@dataclasses.dataclass(frozen=True)
class Dot(dense.Dense):
    """The static part of one product; hashable. kernel_dim: the dim of the kernel that is split over the axis."""

    dims: Dims | None = None
    kernel_dim: int = 0
    preferred_element_type: Any = None

    name: ClassVar[str] = NAME

    def fits(self, x, kernel) -> bool:
        return True  # `Dims.of` has seen to it

    def specs(self, x, kernel, mesh) -> tuple[P, P, P]:
        dims = self.dims
        row = self.kind == "row"
        self.check_split(f"dim {self.kernel_dim} of the kernel", kernel.shape[self.kernel_dim], mesh)
        sequence = sequence_of(self, x, dims.x_free)
        split = dims.x_summed[dims.kernel_summed.index(self.kernel_dim)] if row else None
        x_axes = other_axes(
            self, x, mesh, summed=dims.x_summed, split=split, sequence=sequence, shared=dims.x_batch
        )  # fmt: skip
        kernel_axes = [[] for _ in range(kernel.ndim)]
        kernel_axes[self.kernel_dim] = [self.axis]
        for x_dim, kernel_dim in zip(dims.x_batch, dims.kernel_batch, strict=True):
            kernel_axes[kernel_dim] = x_axes[x_dim]
        y_axes = [list(x_axes[d]) for d in (*dims.x_batch, *dims.x_free)]
        y_axes += [[self.axis] if d == self.kernel_dim and not row else [] for d in dims.kernel_free]
        if row:
            x_axes[split] = [self.axis]
        if sequence is not None:
            whole, d = (y_axes, dims.in_result(sequence)) if row else (x_axes, sequence)
            whole[d] = [*whole[d], self.axis]
        return spec_of(x_axes), spec_of(kernel_axes), spec_of(y_axes)

    def run(self, x, kernel, bias, scales: SiteScales) -> jax.Array:
        def product(x, kernel):
            return lax.dot_general(
                x, kernel, self.dims.numbers, precision=self.precision,
                preferred_element_type=self.preferred_element_type,
            )  # fmt: skip

        if self.dims.is_matmul(x, kernel) and self.preferred_element_type is None:
            product = None  # may be one kernel with its sum
        sequence, run = self.sequence_dim, column_dense
        if self.kind == "row":
            run = row_dense
            sequence = None if sequence is None else self.dims.in_result(sequence % x.ndim)
        return run(
            x, kernel, bias, axis=self.axis, compression=self.compression, scales=scales, sequence_dim=sequence,
            dtype=self.dtype, precision=self.precision, site=self.site, product=product,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """The result of `taco_jax.dot_general`: a function like `jax.lax.dot_general`. Hashable, equal where its options
    are, so that modules that hold it are."""

    axis: str
    _: dataclasses.KW_ONLY
    compression: str | Codec | Compression | None
    kind: str | None = None
    kernel_dim: int | None = None
    mesh: Any = None
    batch_axes: str | Iterable[str] | None = None
    sequence_dim: int | None = None
    site: str = ""

    def __post_init__(self):
        if not isinstance(self.axis, str):
            raise TypeError(f"{NAME}: axis={self.axis!r}: must be the name of a mesh axis")
        if self.kind is not None:
            check_choice("kind", self.kind, dense.KINDS)
        rule = "must be an integer, a dim, or None"
        for key in ("kernel_dim", "sequence_dim"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, as_integer(f"{NAME}: {key}", getattr(self, key), rule))
        checked = dense.Dense(**self._options())
        for key in ("compression", "batch_axes"):
            object.__setattr__(self, key, getattr(checked, key))

    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None
    ) -> jax.Array:
        x, kernel = jnp.asarray(lhs), jnp.asarray(rhs)
        dims = Dims.of(dimension_numbers, x, kernel)
        found = self._split(dims, x, kernel)
        if found is None:
            return lax.dot_general(
                x, kernel, dims.numbers, precision, preferred_element_type, out_sharding=out_sharding
            )
        kind, kernel_dim = found
        dot = Dot(
            **self._options() | {"kind": kind}, dims=dims, kernel_dim=kernel_dim, precision=precision,
            preferred_element_type=preferred_element_type,
        )  # fmt: skip
        if dense.in_region() and dot.sequence_dim is not None:
            sequence_of(dot, x, dims.x_free)
        y = dense.apply(dot, x, kernel)
        return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)

    def _options(self) -> dict:
        names = ("axis", "compression", "mesh", "batch_axes", "sequence_dim", "site")
        return {name: getattr(self, name) for name in names} | {"site": self.site or "dot"}

    def _split(self, dims: Dims, x, kernel) -> tuple[str, int] | None:
        """(kind, dim of the kernel that is split), None where the types say that nothing is."""
        if dense.in_region():
            check_region(self.axis, NAME, partly=True)
            kind = self._kind_of_shards(x, kernel) if self.kind is None else self.kind
            return None if kind is None else (kind, self._kernel_dim(kind, dims, kernel))
        mesh = dense.known_mesh(dense.Dense(**self._options()))
        types = {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if self.kind is not None or self.axis not in types:  # `dense.apply` says what is wrong with the mesh
            kind = self.kind or "row"
            return kind, self._kernel_dim(kind, dims, kernel)
        if types[self.axis] == AxisType.Auto:
            raise ValueError(
                f"{NAME}: axis {self.axis!r} is of type Auto, so no array's type says what it splits: pass kind='row' "
                "where it splits the dims that are summed over, kind='column' where it splits others of the kernel"
            )
        return self._kind_of_types(dims, x, kernel, mesh)

    def _kernel_dim(self, kind: str, dims: Dims, kernel) -> int:
        valid = dims.kernel_summed if kind == "row" else dims.kernel_free
        if not valid:
            raise ValueError(f"{NAME}: kind={kind!r}: the kernel of shape {kernel.shape} has no dim to split")
        if self.kernel_dim is None:
            return valid[0]
        if not -kernel.ndim <= self.kernel_dim < kernel.ndim or self.kernel_dim % kernel.ndim not in valid:
            raise ValueError(
                f"{NAME}: kernel_dim={self.kernel_dim}: kind={kind!r} of a kernel of shape {kernel.shape} splits one "
                f"of its dims {', '.join(map(str, valid))}"
            )
        return self.kernel_dim % kernel.ndim

    def _kind_of_shards(self, x, kernel) -> str | None:
        """The kind that local shards have by their types."""
        if self.axis not in varying_axes(kernel):
            return None
        if self.sequence_dim is not None:
            raise ValueError(
                f"{NAME}: sequence_dim={self.sequence_dim} inside jax.shard_map: there no type says whether x is split "
                "along it or its features are: pass kind='row' or kind='column'"
            )
        return "row" if self.axis in varying_axes(x) else "column"

    def _kind_of_types(self, dims: Dims, x, kernel, mesh) -> tuple[str, int] | None:
        """The kind that global arrays have by their types, and the dim of the kernel."""
        x_axes, kernel_axes = explicit_axes(x, mesh), explicit_axes(kernel, mesh)
        split = [d for d in range(kernel.ndim) if self.axis in kernel_axes[d]]
        pairs = zip(dims.x_summed, dims.kernel_summed, strict=True)
        split += [d for x_dim, d in pairs if self.axis in x_axes[x_dim] and d not in split]
        if not split:
            return None
        if len(split) > 1 or split[0] in dims.kernel_batch:
            raise ValueError(
                f"{NAME}: axis {self.axis!r} splits what is summed over in one operand and another dim in the other, "
                f"or a batch dim of both (types {jax.typeof(x)} and {jax.typeof(kernel)}); use jax.sharding.reshard "
                "first"
            )
        kind = "row" if split[0] in dims.kernel_summed else "column"
        if self.kernel_dim is not None:
            self._kernel_dim(kind, dims, kernel)
        return kind, split[0]


def dot_general(
    axis: str, *, compression, kind: str | None = None, kernel_dim: int | None = None, mesh=None, batch_axes=None,
    sequence_dim: int | None = None, site: str = "",
) -> DotGeneral:  # fmt: skip
    """Returns a function like `jax.lax.dot_general` whose sum over a mesh axis is compressed, for Flax's own layers.

        y[batch, ..., features] = sum over summed dims of lhs[batch, ..., summed] rhs[batch, summed, features]

        column, row = (taco_jax.dot_general("tensor", compression="int8h", kind=kind) for kind in ("column", "row"))
        nnx.LinearGeneral(1024, (16, 64), dot_general=column, rngs=rngs)
        nnx.Linear(4096, 1024, dot_general=row, rngs=rngs)

    lhs is x, rhs the kernel, in any order of dims. kind="row" splits a dim that is summed over, in both: the forward
    pass sends, the sum of y. kind="column" splits another dim of the kernel: the backward pass sends, the sum of
    dlhs. Gradients of the kernel are summed exactly over the other mesh axes.

    Under plain `jax.jit` it takes global arrays and brings its own `jax.shard_map` over all mesh axes. Inside one of
    yours, manual over the axis, it takes local shards. It works in `jax.lax.scan`, `jax.checkpoint` and `nn.scan`.

    Args:
      axis: the mesh axis.
      compression: as of `taco_jax.psum`. Codecs with a site scale go without one (scales=None), so with a scale for
        each block.
      kind: None: what types say. Explicit axes: the type of the operand that is split. Inside a shard_map: row where
        both operands vary over the axis, column where the kernel alone does. The product is exact, with
        `jax.lax.dot_general`, where the kernel does not, and where no operand is split. Required for Auto axes.
      kernel_dim: the dim of the kernel that is split; None: what its type says, on Auto axes the first that kind
        allows, such as the heads of (D, (heads, head_dim)) and of ((heads, head_dim), D).
      mesh, batch_axes, sequence_dim, site: as of `taco_jax.CompressedDense`. The batch is the first dim of lhs that is
        neither summed over nor shared with the kernel. A dim that both share is not split on Auto axes. sequence_dim
        is a dim of lhs.

    lhs and rhs: bfloat16, float16 or float32; of two dtypes the promoted one. precision, preferred_element_type and
    out_sharding are as of `jax.lax.dot_general`; the sum has the dtype of the result. Wire bytes: `codec.wire_bytes` of
    each hop, of the result of one device (row) or of its dlhs (column).

    `Compression.with_product` holds for products of x [..., D] and kernel [D, F] without preferred_element_type, in
    regions that are manual over all axes. Linen's `init` computes the product too, so it needs the mesh and a batch
    that the mesh divides.

    Raises:
      ValueError: an unknown name, an Auto axis without kind, no mesh, a size that the mesh does not divide, types that
        ask for gathering an operand, error_feedback=True, stochastic rounding, or a region made with check_vma=False.
    """
    return DotGeneral(
        axis, compression=compression, kind=kind, kernel_dim=kernel_dim, mesh=mesh, batch_axes=batch_axes,
        sequence_dim=sequence_dim, site=site,
    )  # fmt: skip


def dot(
    x, kernel, axis: str, *, compression, contract: int = 1, precision=None, preferred_element_type=None,
    out_sharding=None, **options,
) -> jax.Array:  # fmt: skip
    """Returns y[..., features] = x[..., summed] kernel[summed, features], the sum over a mesh axis compressed.

        y_BLD = taco_jax.dot(x_BLF, w_FD, "tp", compression="int8h", kind="row")
        q_BLHK = taco_jax.dot(x_BLD, w_DHK, "tp", compression="int8h", kind="column")
        y_BLD = taco_jax.dot(o_BLHK, w_HKD, "tp", compression="int8h", kind="row", contract=2)

    contract: how many dims are summed over: the last of x, the first of the kernel, as in `jnp.tensordot`. options are
    those of `taco_jax.dot_general`, which says what is sent and what is raised.
    """
    contract = as_integer("dot: contract", contract, "must be an integer, the number of dims that are summed over")
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    if not 1 <= contract <= min(x.ndim, kernel.ndim):
        raise ValueError(
            f"dot: contract={contract}: x has shape {x.shape}, the kernel {kernel.shape}; must be from 1 to "
            f"{min(x.ndim, kernel.ndim)}"
        )
    summed = tuple(range(x.ndim - contract, x.ndim)), tuple(range(contract))
    return dot_general(axis, compression=compression, **options)(
        x, kernel, (summed, ((), ())), precision=precision, preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )  # fmt: skip
