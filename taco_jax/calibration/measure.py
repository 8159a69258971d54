"""Runs a model on batches under a probe: the statistics of every site and direction, and what errors there cost.

    model = Model(config, params, mesh, parallel)
    found = measure(model, batches, codecs)         # {(site, direction): Statistics}

One pass, forward and backward with exact sums, measures all sites and candidates at once. Its labels are drawn from the
model's own distribution, as the Fisher matrix has them: with the text's own labels a model that is too sure of itself
would seem to feel more than it does. For training (`gradients=True`) backward messages and gradients are those of the
text's labels, and each site and direction has one more pass, in which that message alone has the error of the codec
REFERENCE: what it changes in the gradient of the parameters.

Dims: B sequences, L tokens, N layers, C channels, K candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.calibration.probe import Probe
from taco_jax.codec import as_codec
from taco_jax.collectives.vjp import probed_by
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SiteScales
from taco_jax.models import decoder
from taco_jax.models.config import ModelConfig
from taco_jax.models.params import param_specs
from taco_jax.models.run_config import Parallel
from taco_jax.tensor_parallel import to_varying

DIRECTIONS = ("forward", "backward")
REFERENCE = "int6h"
"""The codec whose error is injected: small enough that its effect grows with its square."""
LABELS = ("model", "text")
OUTLYING = 6.0
"""A channel is outlying where its root mean square is so many times that of the median channel."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder on a mesh. params: on the mesh, as `param_specs` cuts them. parallel: its plan is not looked at."""

    config: ModelConfig
    params: Any
    mesh: Mesh
    parallel: Parallel

    @property
    def tp(self) -> int:
        return self.mesh.shape["tp"]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """One direction of a site, by batch (first dim) and, in layers, by layer: sums as in `taco_jax.calibration.probe`.

    head: HEAD by name [batches, N]. of_codec: OF_CODEC by name [batches, N, K]. channels: x^2 [batches, N, C].
    gradient_error: relative squared error of the parameters' gradient that REFERENCE makes here, all layers at once
      [batches]; None where it was not measured. elements: of one message of one layer. layers: N, 0 for a site outside
      of layers (whose arrays have N = 1). tokens: predicted in a batch.
    """

    codecs: tuple[str, ...]
    head: dict[str, np.ndarray]
    of_codec: dict[str, np.ndarray]
    channels: np.ndarray
    elements: int
    layers: int
    tokens: int
    gradient_error: np.ndarray | None = None

    def layer(self, index: int) -> Statistics:
        """Returns the statistics of one layer."""
        cut = lambda values: {name: value[:, index : index + 1] for name, value in values.items()}
        channels = self.channels[:, index : index + 1]
        return dataclasses.replace(self, head=cut(self.head), of_codec=cut(self.of_codec), channels=channels)

    @property
    def kurtosis(self) -> float:
        """Returns the kurtosis of the values that ranks hand in: 3 for a normal distribution."""
        count, square, fourth = (self.head[key].sum() for key in ("values", "square", "fourth"))
        return float(fourth * count / square**2) if square else 0.0

    @property
    def outlying_channels(self) -> int:
        """Channels whose root mean square is OUTLYING times that of the median one; the mean over layers, rounded."""
        square_NC = self.channels.sum(0)
        median_N = np.median(square_NC, axis=-1, keepdims=True)
        return int(round(float((square_NC > OUTLYING**2 * median_N).sum(-1).mean())))

    @property
    def relative_errors(self) -> np.ndarray:
        """Sum of e^2 over sum of y^2 of each candidate, float64[K]."""
        signal = self.head["signal"].sum()
        return self.of_codec["noise"].sum((0, 1)) / signal if signal else np.zeros(len(self.codecs))

    def snr_db(self) -> np.ndarray:
        """Returns the SNR of each candidate, float64[K]; inf where nothing is lost."""
        with np.errstate(divide="ignore"):
            return -10 * np.log10(self.relative_errors)

    def rises(self, feedback: bool = False, by: str = "diagonal") -> np.ndarray:
        """The predicted rise of the mean loss in nats a token with each candidate, by batch: float64[batches, K].

        Forward messages only; of a backward one the loss feels nothing (zeros).
        """
        copies = self.head["results"][:, :1] / self.elements  # ranks that added up the same values
        sums = self.of_codec[by + ("_fed" if feedback else "")].sum(1) / copies
        return sums / (2 * self.tokens)

    def sensitivity(self, feedback: bool = False, by: str = "diagonal") -> float:
        """Returns the rise of the loss, in nats, for a relative squared error of 1: the mean over candidates."""
        return float(self.sensitivities(feedback, by).mean())

    def sensitivities(self, feedback: bool = False, by: str = "diagonal") -> np.ndarray:
        """Returns `sensitivity` by batch."""
        relative = self._relative()
        seen = relative > 0
        ratios = np.where(seen, self.rises(feedback, by) / np.where(seen, relative, 1), 0.0)
        return ratios.sum(1) / np.maximum(seen.sum(1), 1)

    def gradient_sensitivities(self) -> np.ndarray:
        """Returns the gradient's relative squared error for one of 1 at the message, by batch."""
        at = self._relative()[:, self.codecs.index(REFERENCE)]
        return self.gradient_error / np.where(at, at, 1)

    def _relative(self) -> np.ndarray:
        """`relative_errors` by batch."""
        signal = self.head["signal"].sum(1)
        return self.of_codec["noise"].sum(1) / np.where(signal, signal, 1)[:, None]


def measure(
    model: Model,
    batches: Sequence[np.ndarray],
    codecs: Sequence[str],
    *,
    sites: Sequence[str],
    feedback: bool,
    gradients: bool,
    labels: str = LABELS[0],
    exponent: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[tuple[str, str], Statistics], float]:
    """Returns ({(site, direction): Statistics} of all messages that are sent, the exact loss in nats a token).

    Args:
      batches: int32[B, L + 1] ids, of one shape.
      codecs: texts of the candidates, REFERENCE among them where gradients are measured.
      sites: those to measure; messages of others are exact and not looked at.
      feedback: also measure errors that the next sum takes along (whole sequences, no normalised sums).
      gradients: measure what errors do to the parameters' gradient.
      labels: of forward messages' gradients, "model" or "text".
      exponent: of site scales, 0 in inference; None: by the largest value, as the trainer calibrates them.

    Raises:
      ValueError: a loss, or sums over a site's values, that are not finite.
    """
    probe = Probe((), as_codec(REFERENCE), exponent=exponent)
    make = lambda codecs, gradients: Program(
        model, dataclasses.replace(probe, codecs=codecs), sites, feedback, gradients
    )
    program = make(tuple(as_codec(codec) for codec in codecs), False)
    injected = make((), True) if gradients else None  # without candidates, which would be measured each time
    draw = Draw(model)
    rows: dict[str, list[np.ndarray]] = {site: [] for site in sites}
    errors: dict[tuple[str, str], list[float]] = {}
    losses = []
    for number, batch in enumerate(batches):
        tokens, targets = batch[:, :-1].astype(np.int32), batch[:, 1:].astype(np.int32)
        drawn, loss = draw(tokens, targets, number)
        losses.append(loss)
        if not np.isfinite(loss):
            raise ValueError(f"the loss of batch {number} is {loss}: the model's values are not finite")
        felt = program.run(tokens, targets if labels == "text" else drawn)[1]
        measures = program.run(tokens, targets)[1] if gradients and labels != "text" else felt
        for site in sites:
            rows[site].append(np.stack([felt[site][..., 0, :], measures[site][..., 1, :]], -2).astype(np.float64))
        if gradients:
            exact = injected.run(tokens, targets)[0]
            for site, direction in program.sent(measures):
                changed = injected.run(tokens, targets, switched=(site, direction))[0]
                errors.setdefault((site, direction), []).append(float(program.relative(changed, exact)))
        say(f"batch {number + 1} of {len(batches)}: loss {loss:.4f}")
    elements = batches[0].shape[0] * (batches[0].shape[1] - 1)
    found = {}
    for site, direction in program.sent({site: rows[site][0] for site in sites}):
        stacked = np.stack(rows[site])[..., DIRECTIONS.index(direction), :]
        layers = stacked.shape[1] if stacked.ndim == 3 else 0
        head, of_codec, channels = program.probe.read(stacked if layers else stacked[:, None])
        error = np.array(errors[site, direction]) if gradients else None
        sums = (*head.values(), *of_codec.values(), *(() if error is None else (error,)))
        if not all(np.isfinite(values).all() for values in sums):
            raise ValueError(f"site {site!r} {direction}: its values are too large to be measured, or not finite")
        found[site, direction] = Statistics(
            tuple(codecs), head, of_codec, channels, elements=elements * model.config.d_model, layers=layers,
            tokens=elements, gradient_error=error,
        )  # fmt: skip
    return found, float(np.mean(losses))


class Draw:
    """The compiled forward pass that draws labels."""

    def __init__(self, model: Model):
        self.model = model
        exact = dict.fromkeys(decoder.site_names(model.config, model.tp))
        self.parallel = dataclasses.replace(model.parallel, plan=exact, chains=1)
        specs = (param_specs(model.config, model.tp), P(), P(), P())
        self._run = jax.jit(jax.shard_map(self._draw, mesh=model.mesh, in_specs=specs, out_specs=P()))

    def __call__(self, tokens_BL: np.ndarray, targets_BL: np.ndarray, seed: int) -> tuple[np.ndarray, float]:
        """Returns (ids int32[B, L] drawn from what the model expects at each position, the mean loss of targets)."""
        drawn, nll = [], 0.0
        # The logits of one sequence exist at once.
        for row, (tokens_L, targets_L) in enumerate(zip(tokens_BL, targets_BL)):
            key = jax.random.fold_in(jax.random.key(seed), row)
            placed = jax.device_put((tokens_L[None], targets_L[None], key), NamedSharding(self.model.mesh, P()))
            ids, of_row = self._run(self.model.params, *placed)
            drawn.append(np.asarray(ids[0]))
            nll += float(of_row)
        return np.stack(drawn).astype(np.int32), nll / targets_BL.size

    def _draw(self, params, tokens_BL, targets_BL, key):
        logits_BLV = decoder.logits(params, tokens_BL, self.model.config, self.parallel, {})
        scores_BL1 = jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), targets_BL[..., None], -1)
        return jax.random.categorical(key, logits_BLV), -jnp.sum(scores_BL1)


class Program:
    """The compiled pass of a model under a probe. Without `gradients` it returns none, and injects nothing."""

    def __init__(self, model: Model, probe: Probe, sites: Sequence[str], feedback: bool, gradients: bool):
        self.model, self.gradients, self.sites = model, gradients, tuple(sites)
        self.probe = probe if self.gradients else dataclasses.replace(probe, injected=None)
        config = model.config
        fed = {site: feedback and site.endswith(("attn/out", "mlp/down")) for site in sites}
        names = decoder.site_names(config, model.tp)
        plan = {s: Compression(REFERENCE, min_bytes=0, error_feedback=fed[s]) if s in fed else None for s in names}
        self.parallel = dataclasses.replace(model.parallel, plan=plan, chains=1)
        self.shapes = {site: (config.n_layers,) if site.startswith("layers/") else () for site in sites}
        specs = param_specs(config, model.tp)
        mapped = jax.shard_map(
            self._pass, mesh=model.mesh, in_specs=(specs, P(), P(), P()),
            out_specs=(specs if self.gradients else P(), P()),
        )  # fmt: skip
        self._run = jax.jit(mapped)
        self.relative = jax.jit(_relative)

    def run(self, tokens_BL: np.ndarray, targets_BL: np.ndarray,
            switched: tuple[str, str] | None = None) -> tuple[Any, dict[str, Any]]:  # fmt: skip
        """Returns (the gradient, measures [(N,) 2, columns] by site) of int32 ids.

        switched: the site and direction that has the error of REFERENCE.
        """
        switches = {site: np.zeros((*shape, 2), np.int32) for site, shape in self.shapes.items()}
        if switched is not None:
            switches[switched[0]][..., DIRECTIONS.index(switched[1])] = 1
        placed = jax.device_put((switches, tokens_BL, targets_BL), NamedSharding(self.model.mesh, P()))
        with probed_by(self.probe):
            gradient, measures = self._run(self.model.params, *placed)
        return gradient, jax.device_get(measures)

    def sent(self, measures: dict[str, Any]) -> list[tuple[str, str]]:
        """Returns the sites and directions that have a message."""
        column = 1  # the number of values
        return [(s, d) for s in self.sites for i, d in enumerate(DIRECTIONS) if measures[s][..., i, column].any()]

    def _pass(self, params, switches, tokens_BL, targets_BL):
        config, axis = self.model.config, self.parallel.axis
        width = self.probe.width(config.d_model)
        slots = {s: to_varying(jnp.zeros((*shape, 2, width)), axis) for s, shape in self.shapes.items()}

        def loss(params, slots):
            state = {site: SiteScales(switches[site], slots[site]) for site in slots}
            batch, model = (tokens_BL, targets_BL, jnp.ones(targets_BL.shape)), (config, self.parallel, state)
            return decoder.loss(params, *batch, *model)[0]

        if not self.gradients:
            return {}, _sum(jax.grad(loss, argnums=1)(params, slots), axis)
        gradient, measures = jax.grad(loss, argnums=(0, 1))(params, slots)
        return gradient, _sum(measures, axis)


def _sum(tree: Any, axis: str) -> Any:
    """The psum of a tree as one collective: of single leaves some could run beside a loop (`probe._after`)."""
    flat, unravel = ravel_pytree(tree)
    return unravel(lax.psum(flat, axis))


def _relative(changed, exact) -> jax.Array:
    """|changed - exact|^2 / |exact|^2 over all leaves."""
    total = lambda tree: sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))
    return total(jax.tree.map(jnp.subtract, changed, exact)) / total(exact)
