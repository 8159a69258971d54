"""Error feedback of the sums of a decoder's input gradients, behind the normalisations."""

import dataclasses
import functools

import numpy as np
import pytest
from hlo import collectives
from model_helpers import CONFIGS, GEMMA, QWEN2, Run, assert_gradients_close, reference_gradients

from taco_jax.compression.compression import Compression, Plan
from taco_jax.models import decoder
from taco_jax.models.run_config import Parallel

SLOW = pytest.mark.slow
DEEP = dataclasses.replace(QWEN2, n_layers=8)


@dataclasses.dataclass(frozen=True)
class Fed(Run):
    """Backward in 4 bits, or exactly, with or without feedback; forward as `forward` says, with feedback."""

    feedback: bool = True
    exact: bool = False
    forward: str = "none"

    @property
    def par(self) -> Parallel:
        compression = Compression(
            self.forward, backward="int4h", min_bytes=1 << 30 if self.exact else 0,
            error_feedback=self.forward != "none", backward_error_feedback=self.feedback,
        )  # fmt: skip
        plan = Plan({"*": compression}).resolve(decoder.site_names(self.config, self.tp))
        return Parallel(plan=plan, remat=self.remat, dtype=self.dtype, loss_chunk=self.loss_chunk)


def distance(got, want):
    """Of all gradients together."""
    square = lambda tree: sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in tree.values())
    return np.sqrt(square({path: got[path] - want[path] for path in want}) / square(want))


@pytest.mark.parametrize(
    "config, options",
    [
        pytest.param(QWEN2, {"tp": 4, "dp": 2, "remat": "full"}, id="qwen2"),
        pytest.param(CONFIGS["gpt2"], {"tp": 2, "remat": "dots"}, marks=SLOW, id="gpt2"),
        pytest.param(CONFIGS["qwen3"], {"tp": 8}, marks=SLOW, id="qwen3"),
        pytest.param(GEMMA, {"tp": 2, "remat": "dots"}, marks=SLOW, id="gemma"),
    ],
)
def test_exact_gradients_are_those_of_one_device(config, options):
    """The errors' path changes nothing where no sum loses anything: leaf by leaf, norms and their sums among them."""
    loss, gradients, _ = Fed(config, exact=True, **options).gradients()
    want_loss, want = reference_gradients(config)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_gradients_close(gradients, want, exact=True)


def test_layers_hand_errors_on():
    """Of 0.123 without feedback, 0.024 are left; 0.132 are if the layers drop what their sums lost."""
    _, gradients, amax = Fed(QWEN2, tp=4, dp=2, remat="full").gradients()
    assert distance(gradients, reference_gradients(QWEN2)[1]) < 0.05
    # The sites' measures are there as without.
    for site in ("layers/attn/qkv", "layers/mlp/up", "head"):
        assert np.all(amax[site][..., 1, 0] > 0), site


@functools.cache
def deep(**options):
    run = Fed(DEEP, tp=4, batch=2, length=32, **options)
    compiled, table = run.compiled()
    return run.gradients()[1], table.rows(), collectives(compiled)


@functools.cache
def deep_exact():
    return Run(DEEP, tp=4, batch=2, length=32).gradients()[1]


@SLOW
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_gradients_are_nearer_and_the_messages_the_same(remat):
    (fed, rows, sent), (without, other_rows, other_sent) = (deep(remat=remat, feedback=f) for f in (True, False))
    want = deep_exact()
    # 0.06 of it here; 0.5 if the errors were not carried from layer to layer.
    assert distance(fed, want) < 0.1 * distance(without, want)
    whole = np.sqrt(sum(np.vdot(leaf, leaf) for leaf in want.values()))
    for path, leaf in want.items():
        slope = np.vdot(fed[path], leaf) / np.vdot(leaf, leaf)
        assert np.linalg.norm(leaf) < 1e-2 * whole or abs(slope - 1) < 5e-3, path
    coded = lambda sent: sorted(c for c in sent if c[1] == "uint8")
    assert coded(sent) == coded(other_sent) and len(coded(sent)) == 6  # three messages of two hops
    named = lambda rows: {(row.site, row.direction): row for row in rows}
    added = {key: row for key, row in named(rows).items() if key not in named(other_rows)}
    norms = ("layers/attn_norm/scale/grad", "layers/mlp_norm/scale/grad", "final_norm/scale/grad")
    assert set(added) == {(site, "backward") for site in norms}
    assert {row.kind for row in added.values()} == {"other"}
    assert {key: row for key, row in named(rows).items() if key not in added} == named(other_rows)


@SLOW
def test_both_directions():
    """The forward errors too, in one stream: their own path does not touch the gradients'."""
    want = deep_exact()
    both, without = deep(forward="mxfp4")[0], deep(forward="mxfp4", feedback=False)[0]
    assert distance(both, want) < 0.5 * distance(without, want)


@pytest.mark.parametrize("key, value", [("sequence_parallel", True), ("chains", 2)])
def test_other_ways_of_sending_are_refused(key, value):
    plan = {"layers/mlp/up": Compression("int4h", backward_error_feedback=True)}
    what = {"chains": "one chain"}.get(key, "whole sequences")
    message = f"{key}={value}: backward_error_feedback .site 'layers/mlp/up'. is for {what}"
    with pytest.raises(ValueError, match=message):
        Parallel(plan=plan, **{key: value})
