"""CompressedDense as pure functions: `nnx.py` (NNX) and `linen.py` (Linen) only hold its variables.

    column: y[..., F] = f(x)[..., D] kernel[D, F] + bias[F]      backward: compressed all-reduce of dx
    row:    y[..., D] = g(x[..., F] kernel[F, D]) + bias[D]      forward: compressed all-reduce of y

`apply` runs as it is, on local shards, inside a region that is manual over the axis. Elsewhere it wraps itself in one
`jax.shard_map` over all mesh axes, on global arrays. `dot.py` runs products of other dims in the same way.

Dim letters: D features, F features split over the axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.codec import Codec, check_choice
from taco_jax.collectives import check_region, comm_log, to_varying
from taco_jax.collectives.topology import ranks_per_host
from taco_jax.compat import varying_axes
from taco_jax.compression.compression import Compression, as_compression, as_integer, without_key
from taco_jax.compression.site_scales import SiteScales
from taco_jax.nn.dense_layout import activation_specs, typed
from taco_jax.tensor_parallel import column_dense, row_dense

KINDS = ("column", "row")


@dataclasses.dataclass(frozen=True)
class Dense:
    """The static part of one layer; hashable. Arguments as of `taco_jax.CompressedDense`."""

    kind: str = "column"
    axis: str = "tp"
    compression: str | Codec | Compression | None = None
    dtype: Any = None
    precision: Any = None
    mesh: Any = None
    batch_axes: str | Iterable[str] | None = None
    sequence_dim: int | None = None
    site: str = ""

    name: ClassVar[str] = "CompressedDense"

    def __post_init__(self):
        check_choice("kind", self.kind, KINDS)
        compression = without_key(as_compression(self.compression))
        if compression is not None and compression.error_feedback:
            raise ValueError(
                "compression.error_feedback=True: a layer by itself hands no error on; leave it out, or sum with "
                "taco_jax.psum_with_feedback"
            )
        if compression is not None and compression.backward_error_feedback:
            raise ValueError(
                "compression.backward_error_feedback=True: a layer by itself hands no error on; leave it out"
            )
        object.__setattr__(self, "compression", compression)
        object.__setattr__(self, "site", self.site or self.kind)
        if self.batch_axes is not None:
            given = self.batch_axes
            axes = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
            if axes is None or not all(isinstance(axis, str) for axis in axes):
                raise TypeError(f"batch_axes={given!r}: must be the name of a mesh axis, several of them, or None")
            object.__setattr__(self, "batch_axes", axes)
        if self.sequence_dim is not None:
            as_integer("sequence_dim", self.sequence_dim, "must be an integer, a dim of x, or None")
        if self.mesh is not None:
            if not isinstance(self.mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                raise TypeError(f"mesh={self.mesh!r}: must be a jax.sharding.Mesh, as of jax.make_mesh, or None")
            self.check_mesh(self.mesh)

    @property
    def kernel_names(self) -> tuple[str | None, str | None]:
        """The mesh axis of each dim of the kernel."""
        return (None, self.axis) if self.kind == "column" else (self.axis, None)

    @property
    def bias_names(self) -> tuple[str | None]:
        return (self.axis,) if self.kind == "column" else (None,)

    def check_mesh(self, mesh) -> None:
        """Raises ValueError for an axis that the mesh does not have."""
        check_choice("axis", self.axis, mesh.axis_names)
        for axis in self.batch_axes or ():
            check_choice("batch_axes", axis, tuple(a for a in mesh.axis_names if a != self.axis))

    def check_features(self, in_features: int, out_features: int, mesh) -> None:
        """Raises ValueError or TypeError unless these are sizes, and the axis divides the one that it splits."""
        check_sizes(in_features, out_features)
        column = self.kind == "column"
        self.check_split(*(("out_features", out_features) if column else ("in_features", in_features)), mesh)

    def check_split(self, name: str, value: int, mesh) -> None:
        """Raises ValueError unless the axis divides a size."""
        ranks = mesh.shape[self.axis]
        if value % ranks:
            multiples = [m for m in (value // ranks * ranks, (value // ranks + 1) * ranks) if m]
            divisors = [n for n in range(1, min(value, 64) + 1) if value % n == 0]
            raise ValueError(
                f"{name}={value}: kind={self.kind!r} splits it over the {ranks} devices of axis {self.axis!r}, so it "
                f"must be a multiple of {ranks}: try {_or(multiples)}, or an axis of {_or(divisors)} devices"
            )

    def fits(self, x, kernel) -> bool:
        """Returns whether x and the kernel, global arrays or one device's, agree in the sizes that are summed over."""
        return x.ndim > 0 and x.shape[-1] == kernel.shape[0]

    def specs(self, x, kernel, mesh) -> tuple[P, P, P]:
        """Returns how global x, kernel and y lie on the mesh. Raises ValueError for sizes that it does not divide."""
        if not self.fits(x, kernel):
            raise ValueError(f"{self.name}: x has shape {x.shape}; its last dim must be in_features={kernel.shape[0]}")
        self.check_features(*kernel.shape, mesh)
        x_spec, y_spec = activation_specs(self, x, mesh)
        return x_spec, P(*self.kernel_names), y_spec

    def run(self, x, kernel, bias, scales: SiteScales) -> jax.Array:
        """y of one device's shards, inside a region."""
        run = column_dense if self.kind == "column" else row_dense
        return run(
            x, kernel, bias, axis=self.axis, compression=self.compression, scales=scales,
            sequence_dim=self.sequence_dim, dtype=self.dtype, precision=self.precision, site=self.site,
        )  # fmt: skip


def check_sizes(in_features: int, out_features: int) -> None:
    """Raises ValueError or TypeError for what are no numbers of features."""
    for name, value in (("in_features", in_features), ("out_features", out_features)):
        rule = "must be an integer of at least 1"
        if as_integer(name, value, rule) < 1:
            raise ValueError(f"{name}={value}: {rule}")


def known_mesh(dense: Dense):
    """The layer's mesh, or that of `jax.set_mesh`, or None."""
    context = jax.sharding.get_abstract_mesh()
    if dense.mesh is None:
        return None if context.empty else context
    if not context.empty and dict(context.shape) != dict(dense.mesh.shape):
        raise ValueError(
            f"{dense.name}: mesh has the axes {dict(dense.mesh.shape)}, that of jax.set_mesh {dict(context.shape)}; "
            "leave mesh out, or make them the same"
        )
    return dense.mesh


def can_place(mesh) -> bool:
    """Returns whether Flax can shard a new parameter at once: not without a mesh, in a region, on mixed axis types."""
    return mesh is not None and len(set(mesh.axis_types)) == 1 and AxisType.Manual not in mesh.axis_types


def can_constrain(mesh) -> bool:
    """Returns whether jax.lax.with_sharding_constraint shards on this mesh, instead of asserting that it is done."""
    return mesh is not None and set(mesh.axis_types) == {AxisType.Auto}


def place_whole(value: jax.Array, mesh) -> jax.Array:
    """Returns a layer's new state on all devices of its mesh, where its parameters are; as it is without a mesh.

    A checkpoint brings each variable back where it was, for good.
    """
    if mesh is None or in_region() or not can_place(mesh):
        return value
    return jax.device_put(value, NamedSharding(mesh, P()))


def in_region() -> bool:
    """True inside any shard_map, whatever its manual axes."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def local_shape(dense: Dense, in_features: int, out_features: int, *, initializing: bool) -> tuple[int, int]:
    """The shape of the kernel's local shard inside a region, where in_features are those of a local x."""
    if initializing:
        raise ValueError(
            f"{dense.name}: sizes are global; initialise it outside jax.shard_map and pass the variables in"
        )
    check_region(dense.axis, dense.name, partly=True)
    return in_features, out_features // lax.axis_size(dense.axis) if dense.kind == "column" else out_features


def apply(dense: Dense, x, kernel, bias=None, scales: SiteScales | None = None, sizes=None) -> jax.Array:
    """y of the layer.

    Args:
      x: [..., in_features]; dim 0 is the batch. Inside a region the local shard.
      kernel: [in_features, out_features]; bias: [out_features] or None. Inside a region the local shards.
      scales: exponents int32[2] and slot float32[2, K] or None, both the same on every device. The slot's cotangent is
        the maximum over devices.
      sizes: the global (in_features, out_features) if known, for checking local shards.
    """
    exponents, slot = scales or SiteScales()
    if in_region():
        check_region(dense.axis, dense.name, partly=True)
        _check_local(dense, x, kernel, sizes)
        return _local(dense, x, kernel, bias, exponents=exponents, slot=slot)
    mesh = known_mesh(dense)
    if mesh is None:
        raise ValueError(
            f"{dense.name} has no mesh: pass mesh=jax.make_mesh((2, 4), ('dp', {dense.axis!r}), "
            "axis_types=(jax.sharding.AxisType.Auto,) * 2) to it, or call the model under `with "
            "jax.set_mesh(mesh):`, or inside jax.shard_map"
        )
    dense.check_mesh(mesh)
    x_spec, kernel_spec, y_spec = dense.specs(x, kernel, mesh)
    arguments = (x, kernel, bias, exponents, slot)
    specs = (x_spec, kernel_spec, P(*dense.bias_names), P(), P())
    specs = tuple(None if a is None else spec for a, spec in zip(arguments, specs, strict=True))
    arguments = [None if a is None else typed(a, mesh, spec) for a, spec in zip(arguments, specs, strict=True)]
    dense = _with_hosts(dense, mesh)
    # The cached program serves eager calls too. It records no messages again, so a recording gets a new one.
    build = _sharded.__wrapped__ if comm_log.recording() else _sharded
    return build(dense, mesh, specs, y_spec)(*arguments)


def apply_unsharded(dense: Dense, x, kernel, bias=None) -> jax.Array:
    """The same equation, exact and without a mesh: what initialisation traces."""
    dtype = jnp.result_type(x, kernel) if dense.dtype is None else dense.dtype
    y = jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision=dense.precision)
    return y if bias is None else y + bias.astype(dtype)


@functools.lru_cache(maxsize=512)
def _sharded(dense: Dense, mesh, in_specs, out_specs):
    def compressed_dense(*arguments):
        return _local(dense, *arguments)

    return jax.jit(jax.shard_map(compressed_dense, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@functools.lru_cache(maxsize=512)
def _with_hosts(dense: Dense, mesh) -> Dense:
    """The layer with what its mesh's devices say of their hosts: inside the region they are not known."""
    compression = dense.compression
    if compression is None or compression.ranks_per_host is not None or not isinstance(mesh, jax.sharding.Mesh):
        return dense
    local = ranks_per_host(mesh, dense.axis)
    return dataclasses.replace(dense, compression=dataclasses.replace(compression, ranks_per_host=local))


def _local(dense: Dense, x, kernel, bias, exponents, slot) -> jax.Array:
    # Parameters are made varying like x before they are cast to the compute dtype: the transpose, the sum of their
    # gradients over the data-parallel axes, then runs in the parameters' own dtype.
    axes = varying_axes(x) | {dense.axis}
    kernel = _share(dense, kernel, axes)
    if bias is not None:
        y_is_whole = dense.kind == "row" and dense.sequence_dim is None
        bias = _share(dense, bias, axes - {dense.axis} if y_is_whole else axes)
    if slot is not None:
        mesh = jax.sharding.get_abstract_mesh()
        shared = tuple(a for a in mesh.axis_names if a in mesh.manual_axes and a not in varying_axes(slot))
        slot = _per_device(shared, dense.site, slot) if shared else slot
    return dense.run(x, kernel, bias, SiteScales(exponents, slot))


def _share(dense: Dense, parameter, axes: frozenset[str]):
    added = tuple(sorted(a for a in axes - varying_axes(parameter) if lax.axis_size(a) > 1))
    if added:
        comm_log.exact(f"{dense.site}/parameters", "backward", "psum", added, parameter)
    return to_varying(parameter, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _per_device(axes: tuple[str, ...], site: str, slot):
    """A slot for every device from a shared one, whose cotangent is the maximum of theirs instead of the sum."""
    return lax.pcast(slot, axes, to="varying")


def _per_device_fwd(axes, site, slot):
    return lax.pcast(slot, axes, to="varying"), None


def _per_device_bwd(axes, site, _, ct):
    # A reduction may drop a NaN from a maximum, never an infinity; `update_scale_state` skips both.
    ct = jnp.where(jnp.isnan(ct), jnp.inf, ct)
    comm_log.exact(f"{site}/amax", "backward", "pmax", axes, ct)
    return (lax.pmax(ct, axes),)


_per_device.defvjp(_per_device_fwd, _per_device_bwd)


def _check_local(dense: Dense, x, kernel, sizes) -> None:
    inside = f"{dense.name}(kind={dense.kind!r}) inside jax.shard_map"
    ranks, whole = lax.axis_size(dense.axis), False
    if sizes is not None:
        kernel_dim = dense.kernel_names.index(dense.axis)
        whole = kernel.shape[kernel_dim] * ranks != sizes[kernel_dim]
    # Where nothing varies at all, Flax's nn.scan is only asking for shapes.
    if dense.kind == "row" and ranks > 1 and varying_axes(x):
        whole |= dense.axis not in varying_axes(x) | varying_axes(kernel)
    if whole or not dense.fits(x, kernel):
        features = "its shard of the features" if dense.kind == "row" else "all features"
        raise ValueError(
            f"{inside}: x has shape {x.shape}, the kernel {jax.typeof(kernel)}. Each device must hold {features} in "
            "x and its shard of the kernel: pass the layer's variables with in_specs=nnx.get_partition_spec(state) "
            "(NNX) or nn.get_partition_spec(variables) (Linen)"
        )
    if dense.kind == "column" and dense.sequence_dim is None and dense.axis in varying_axes(x):
        raise ValueError(
            f"{inside}: x differs between the devices of axis {dense.axis!r} (type {jax.typeof(x)}) but must be the "
            "same on all. Set sequence_dim if it is split along a dim, or gather it with jax.lax.all_gather(..., "
            "to='invarying')"
        )


def _or(values) -> str:
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last
