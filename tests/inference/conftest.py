"""The model and the programs that the tests of serving share. What they import comes with the extra `test`, so late."""

import threading

import pytest
from helpers import make_mesh


@pytest.fixture(scope="session")
def generator(tmp_path_factory):
    """A model with a chat template on two devices."""
    from served import save_chat_model

    import taco_jax

    make_mesh(tp=2)  # skips where there are too few devices
    folder = tmp_path_factory.mktemp("llama")
    save_chat_model(folder)
    return taco_jax.Generator(folder, tp=2, dtype="float32")


@pytest.fixture(scope="session")
def programs(generator):
    """Its compiled programs for `served.BATCH` rows."""
    from served import BATCH, LONGEST

    from taco_jax.inference.serving.batch_programs import RowPrograms

    programs = RowPrograms(
        generator.config, generator.settings, generator.mesh, generator.programs.params, BATCH, LONGEST
    )
    programs.compile()
    return programs


@pytest.fixture
def gate(programs, monkeypatch):
    """While it is closed the engine stands still before its next step."""
    from served import LIMIT

    gate, step = threading.Event(), programs.step
    monkeypatch.setattr(programs, "step", lambda **kind: gate.wait(LIMIT) and step(**kind))
    yield gate
    gate.set()
