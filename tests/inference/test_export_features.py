"""Exports of models with scaled rotary positions, windows and Gemma's parts, against transformers' own."""

import numpy as np
import pytest
from families import FAMILIES, reference
from run_folders import save_run

from taco_jax.inference.export import export
from taco_jax.models import huggingface

torch = pytest.importorskip("torch", reason="reads what is written: pip install 'taco-jax[test]'")
transformers = pytest.importorskip("transformers", reason="reads what is written: pip install 'taco-jax[test]'")


@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_logits(tmp_path, name, with_source):
    hf, state, tokens, want = reference(name)
    config = huggingface.config_from_hf(hf)
    params = huggingface.params_from_hf(state, config, tp=2)
    files = {"source_config.json": hf | {"dtype": "float32"}} if with_source else None
    run = save_run(tmp_path / "run", config, tp=2, files=files, params=params)
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
