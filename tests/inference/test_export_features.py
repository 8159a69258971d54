"""Exports of models with scaled rotary positions, windows and Gemma's parts, against transformers' own."""

import json
import shutil

import numpy as np
import pytest
from families import FAMILIES, reference
from run_folders import save_run

from taco_jax.inference.export import export
from taco_jax.models import huggingface

torch = pytest.importorskip("torch", reason="reads what is written: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="reads what is written: pip install 'taco-jax[test]'")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Saved once: the run of a family, which has no source."""
    folder, made = tmp_path_factory.mktemp("runs"), {}

    def run_of(name):
        if name not in made:
            hf, state, *_ = reference(name)
            config = huggingface.config_from_hf(hf)
            params = huggingface.params_from_hf(state, config, tp=2)
            made[name] = save_run(folder / name, config, tp=2, params=params)
        return made[name]

    return run_of


@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(runs, tmp_path, name, with_source):
    hf, _, tokens, want = reference(name)
    run = shutil.copytree(runs(name), tmp_path / "run")
    if with_source:
        (run / "model").mkdir()
        (run / "model" / "source_config.json").write_text(json.dumps(hf | {"dtype": "float32"}))
    folder = export(run, tmp_path / "hf")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    with torch.no_grad():
        got = model.eval()(torch.as_tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())
    if with_source:
        assert model.config.model_type == hf["model_type"]
