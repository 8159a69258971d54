"""How a decoder runs on its mesh: the settings that are not the model's shape, and the helpers that need them.

Everything here runs inside a shard_map that is manual over all mesh axes, with check_vma=True. Dims: B batch, L length,
D model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from taco_jax.collectives import comm_log
from taco_jax.compression.compression import Compression
from taco_jax.tensor_parallel import REMAT_NAMES, to_varying

REMAT = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class Parallel:
    """Hashable settings of a decoder's run; `decoder.forward` and `decoder.loss` take one."""

    axis: str = "tp"
    """Mesh axis of tensor parallelism."""
    plan: tuple[tuple[str, Compression | None], ...] = ()
    """(site, Compression or None) of every site (a mapping is turned into this); None, and an empty plan, is exact."""
    sequence_parallel: bool = False
    """Keep activations between matrix products cut along L: psum_scatter and all_gather instead of all-reduces."""
    remat: str = "none"
    """What the backward pass recomputes: none, dots (all but matrix products) or full; never communication.

    none recomputes the mlp's activation alone, of which the gradient needs more than its arguments. It also keeps
    each layer's weights as cast to `dtype`; dots and full cast them again."""
    dtype: Any = jnp.bfloat16
    """Type of activations, and of weights at use; norms, softmax, rotary positions and loss are float32 in any case."""
    attention_implementation: str | None = None
    """`implementation` of jax.nn.dot_product_attention: None, "xla", or "cudnn" (NVIDIA GPUs, 16-bit types)."""
    chains: int = 1
    """Parts of the batch that go through each layer side by side, so that one part's messages travel during the matrix
    products of another (`taco_jax.models.overlap`); the most that divide it, where this number does not. With more than
    one, compressed layers have first derivatives only (a second one raises NotImplementedError)."""
    end_token: int | None = None
    """Token id that ends a document: attention then stays inside documents. None: it sees the whole sequence."""
    loss_chunk: int | None = None
    """Tokens whose logits exist at once in the loss; None takes the default of `taco_jax.nn.vocab_parallel`."""
    precision: Any = None
    """`precision` of matrix products, as in jax.lax.dot."""
    adapter_scale: float = 1.0
    """How often the adapters of `Adapted` kernels count (`taco_jax.models.lora`)."""
    frozen: bool = False
    """Whether adapters alone have gradients, or nothing, as in inference: the table lists no sums of others' gradients.
    """

    def __post_init__(self):
        plan = self.plan.items() if isinstance(self.plan, Mapping) else self.plan
        object.__setattr__(self, "plan", tuple(sorted(plan, key=lambda entry: entry[0])))
        if self.remat not in REMAT:
            raise ValueError(f"remat={self.remat!r}: must be one of {', '.join(REMAT)}")
        if type(self.chains) is not int or self.chains < 1:
            raise ValueError(f"chains={self.chains!r}: must be an int of at least 1, such as 2")
        for setting in ("error_feedback", "backward_error_feedback"):
            fed_back = [site for site, c in self.plan if c is not None and getattr(c, setting)]
            limits = {"sequence_parallel": (False, "whole sequences")}
            if setting == "backward_error_feedback":
                limits["chains"] = (1, "one chain")
            for key, (limit, what) in limits.items():
                if fed_back and getattr(self, key) != limit:
                    raise ValueError(
                        f"{key}={getattr(self, key)!r}: {setting} (site {fed_back[0]!r}) is for {what}; "
                        f"set {key}={limit}, or leave {setting} out"
                    )
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(f"loss_chunk={self.loss_chunk}: must be at least 1")

    def compression(self, site: str) -> Compression | None:
        """Returns how `site` is compressed; None is exact.

        Raises:
            KeyError: there is a plan and it does not name the site.
        """
        plan = dict(self.plan)
        if plan and site not in plan:
            raise KeyError(f"site {site!r} is not in the plan, which has {', '.join(plan)}; resolve it for all sites")
        return plan.get(site)

    def feeds_gradients_back(self, site: str) -> bool:
        """Returns whether the sum of a site's input gradients takes errors along."""
        compression = dict(self.plan).get(site)
        return compression is not None and compression.backward_error_feedback

    @property
    def sequence_dim(self) -> int | None:
        """The dim of x_BLD that is cut over the axis between matrix products; None if it is whole."""
        return 1 if self.sequence_parallel else None


def remat(layer: Callable, mode: str) -> Callable:
    """`layer`, recomputed in the backward pass as `mode` says.

    Communicated values are saved in every mode (they carry the names REMAT_NAMES), so no collective runs twice.
    "full" saves nothing else, "dots" also the results of matrix products with weights.
    """
    if mode == "none":
        return layer
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*REMAT_NAMES)
    if mode == "dots":
        policy = policies.save_from_both_policies(policy, policies.dots_with_no_batch_dims_saveable)
    # Inside a scan nothing can be merged across the loop's boundary, and the barriers would only cost time.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def use_replicated(param: jax.Array, axis: str, site: str, *, frozen: bool = False) -> jax.Array:
    """A parameter that every rank of `axis` holds, about to meet values that differ between ranks.

    Its gradient is the sum of the ranks' gradients: an exact psum in the parameter's own dtype, so call this on the
    float32 parameter, before any cast, and outside of scans, where one psum serves all layers. Invarying in, varying
    out. frozen: no gradient reaches it, so that none is listed.
    """
    if not frozen:
        comm_log.exact(f"{site}/grad", "backward", "psum", axis, param)
    return to_varying(param, axis)


def own_rows(rows_LD: jax.Array, axis: str, site: str, *, frozen: bool = False) -> jax.Array:
    """This rank's L / tp rows of a replicated table: `rows_LD[rank * L / tp : (rank + 1) * L / tp]`.

    The rows' gradients come from one rank each, so the backward pass gathers them (half the bytes of a psum), exactly
    and in the table's dtype. Invarying in, varying out. frozen: as in `use_replicated`.
    """
    if not frozen:
        comm_log.exact(f"{site}/grad", "backward", "all_gather", axis, rows_LD)
    ranks = lax.axis_size(axis)

    @jax.custom_vjp
    def take(rows_LD):
        length = rows_LD.shape[0] // ranks
        whole_LD = to_varying(rows_LD, axis)
        return lax.dynamic_slice_in_dim(whole_LD, lax.axis_index(axis) * length, length, axis=0)

    take.defvjp(
        lambda rows_LD: (take(rows_LD), None),
        lambda _, ct_LD: (lax.all_gather(ct_LD, axis, axis=0, tiled=True, to="invarying"),),
    )
    return take(rows_LD)
