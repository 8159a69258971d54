"""CompressedDense for Flax NNX: `from taco_jax import CompressedDense`. Its Linen twin is in `taco_jax.linen`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from taco_jax.codec import Codec
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales, new_scale_state
from taco_jax.nn import dense

_KERNEL_INIT, _BIAS_INIT = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


class SiteScaleState(nnx.Variable):
    """State of a layer's site scales, read only within a step: `exponents` int32[2] or `history` float32[2, H]."""


class AmaxSlot(nnx.Variable):
    """Zeros float32[2, 1], never read. The gradient is the largest block scale (forward, backward) on any device."""


class CompressedDense(nnx.Module):
    """A dense layer whose features are split over a mesh axis and whose messages are compressed.

        y[..., out_features] = x[..., in_features] kernel[in_features, out_features] + bias[out_features]

    kind="column" splits out_features: x is the same on every device of `axis`, y is split. Its backward pass sends: the
    all-reduce of dx (Megatron's f). kind="row" splits in_features: x is split, y the same on every device. Its forward
    pass sends: the all-reduce of y (Megatron's g). A column layer, an elementwise function and a row layer are an MLP.

    Under plain `jax.jit` it takes global arrays and brings its own `jax.shard_map` over all mesh axes. Inside a
    shard_map of yours (manual over the axis, check_vma=True) it takes local shards: give its state
    `in_specs=nnx.get_partition_spec(state)`.

    `taco_jax.update_scales` feeds the gradient of the `AmaxSlot` variables back into the `SiteScaleState` variables:

        wrt = nnx.DiffState(0, nnx.Any(nnx.Param, taco_jax.AmaxSlot))
        gradients = nnx.grad(loss, argnums=wrt)(model)
        optimizer.update(model, nnx.filter_state(gradients, nnx.Param))
        nnx.update(model, taco_jax.update_scales(nnx.state(model, taco_jax.SiteScaleState), gradients))

    Who ignores both and differentiates `nnx.Param` as ever trains uncalibrated, which is correct: the scale byte is
    then a power of two. A layer that is called twice in a step adds the two gradients of its slot, so its exponent is
    at most one too high, which clips nothing. For exact ones make two layers with one set of parameters:
    `b.kernel, b.bias = a.kernel, a.bias`.

    Under `jax.checkpoint` the policy `save_only_these_names(*taco_jax.tensor_parallel.REMAT_NAMES)` keeps the backward
    pass from sending forward messages again.

    Orbax brings a model of such layers back, onto another mesh too. `model` is one that was made anew, with `mesh=` or
    inside `jax.set_mesh`: parameters of a layer without either come back on one device and stay there.

        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, nnx.state(model))  # complete where the block ends
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            nnx.update(model, checkpointer.restore(folder, nnx.state(model)))

    Args:
      in_features, out_features: global sizes. The one that is split must be a multiple of the axis.
      kind: "column" or "row".
      axis: mesh axis of tensor parallelism.
      compression: preset name ("taco", "int6h", ...), `Codec`, `Compression`, or None (the default) for exact.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init, rngs: as of `nnx.Linear`, with the same values
        from the same seed. The row bias is added once, after the sum. Gradients of parameters are summed over the
        other mesh axes in param_dtype.
      mesh: by default that of `jax.set_mesh`, looked up at each call. If one of them is there at construction,
        parameters are created sharded and site scales whole on every device, else where JAX puts them.
      batch_axes: mesh axes of dim 0 of x and y, one name or several, () for none. None: what the type of x says on
        Explicit axes, and every Auto axis but `axis`. Not used inside a shard_map.
      sequence_dim: for sequence parallelism. What would be the same on every device is split along this dim instead,
        and all-reduces become all-gathers and reduce-scatters.
      site: name in the table of `taco_jax.collectives.comm_log`, by default the kind.

    Wire bytes: `codec.wire_bytes` of each hop, see `taco_jax.collectives.comm_log`. Beside them only gradients of
    parameters and, where its gradient is taken, 8 bytes of a slot are summed. Source: Megatron-LM (arXiv
    1909.08053), TACO (arXiv 2604.24088).

    Raises:
      ValueError: an unknown name (the message has the nearest), a size that the mesh does not divide (with sizes that
        would work), no mesh, or a region that is not manual over the axis.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kind: str = "column",
        axis: str = "tp",
        compression: str | Codec | Compression | None = None,
        use_bias: bool = True,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: Callable = _KERNEL_INIT,
        bias_init: Callable = _BIAS_INIT,
        mesh=None,
        batch_axes=None,
        sequence_dim: int | None = None,
        site: str = "",
        rngs: nnx.Rngs,
    ):
        dense.check_sizes(in_features, out_features)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, use_bias
        self.dense = dense.Dense(
            kind=kind, axis=axis, compression=compression, dtype=dtype, precision=precision, mesh=mesh,
            batch_axes=batch_axes, sequence_dim=sequence_dim, site=site,
        )  # fmt: skip
        mesh = dense.known_mesh(self.dense)
        if mesh is not None:
            self.dense.check_mesh(mesh)
            self.dense.check_features(in_features, out_features, mesh)
        placement = {} if self.dense.mesh is None else {"mesh": self.dense.mesh}
        if not dense.can_place(mesh):
            # Flax refuses to create a variable with partition metadata where it cannot shard it at once.
            placement = {"eager_sharding": False}

        def parameter(init, shape, names):
            value, metadata = init(rngs.params(), shape, param_dtype), {"out_sharding": names, **placement}
            if isinstance(
                value, nnx.VariableMetadata
            ):  # of an nnx.with_partitioning of the user's: parameters cut finer
                metadata |= {key: given for key, given in value.metadata.items() if given is not None}
                value = value.raw_value
            return nnx.Param(value, **metadata)

        self.kernel = parameter(kernel_init, (in_features, out_features), self.dense.kernel_names)
        self.bias = parameter(bias_init, (out_features,), self.dense.bias_names) if use_bias else nnx.data(None)
        if self.dense.compression is not None:
            state = new_scale_state()
            place = lambda value: dense.place_whole(jnp.asarray(value), self.dense.mesh)
            self.exponents = SiteScaleState(place(state.exponents))
            self.history = SiteScaleState(place(state.history))
            self.amax_slot = AmaxSlot(place(jnp.zeros((2, 1), jnp.float32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        bias = None if self.bias is None else self.bias[...]
        scales = None if self.dense.compression is None else SiteScales(self.exponents[...], self.amax_slot[...])
        return dense.apply(
            self.dense, x, self.kernel[...], bias, scales=scales, sizes=(self.in_features, self.out_features)
        )
