"""What keeps the code readable: few files on a message's way, few positional arguments, jax.lax's own parameters."""

import ast
import inspect
import traceback
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import REPOSITORY, make_mesh
from jax import lax

import taco_jax

PACKAGES = ("taco_jax", "pallas_kernels")
# Modules in the root that are neither a command nor `__init__`.
COMMANDS = {"evaluate", "generate", "plot", "run", "serve", "tune"}


def own_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]


def test_at_most_8_files_from_a_layer_to_the_wire(monkeypatch):
    real, seen = lax.all_to_all, []

    def spy(*args, **kwargs):
        seen.append([Path(frame.filename) for frame in traceback.extract_stack()])
        return real(*args, **kwargs)

    monkeypatch.setattr(lax, "all_to_all", spy)
    options = {"kind": "row", "mesh": make_mesh(tp=4), "rngs": nnx.Rngs(0)}
    layer = taco_jax.CompressedDense(512, 384, compression="taco", **options)
    layer(jnp.ones((8, 512)))
    ours = [path for path in seen[0] if any((REPOSITORY / package) in path.parents for package in PACKAGES)]
    files = list(dict.fromkeys(str(path.relative_to(REPOSITORY)) for path in ours))
    print("\n".join(files))
    assert files[0] == "taco_jax/nn/nnx.py" and len(files) <= 8, files


def long_calls() -> list[str]:
    """Calls with more than five positional arguments."""
    found = []
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and len(node.args) > 5:
                found.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}: {len(node.args)} {ast.unparse(node.func)}")
    return found


def test_at_most_10_calls_have_more_than_5_positional_arguments():
    assert len(long_calls()) <= 10, "\n".join(long_calls())


@pytest.mark.parametrize("name", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_a_collective_has_the_parameters_of_jax_lax_and_four_more(name):
    ours = list(inspect.signature(getattr(taco_jax, name)).parameters)
    theirs = set(inspect.signature(getattr(lax, name)).parameters)
    assert {*ours} - theirs == {"compression", "scales", "key", "site"} and len(ours) <= 10


def test_few_modules_in_the_root():
    assert len({path.stem for path in (REPOSITORY / "taco_jax").glob("*.py")} - COMMANDS - {"__init__"}) <= 6


def test_old_options_are_refused_with_the_new_spelling():
    message = (
        r"psum: codec='taco', link='nccl': options are one object now: compression=Compression\('taco', link='nccl'\)"
    )
    with pytest.raises(TypeError, match=message):
        taco_jax.psum(jnp.ones(2), "tp", codec="taco", link="nccl")
    message = r"copy: codec='taco', backward_codec='int8h': .*Compression\('taco', backward='int8h'\)"
    with pytest.raises(TypeError, match=message):
        taco_jax.copy(jnp.ones(2), "tp", codec="taco", backward_codec="int8h")
    with pytest.raises(TypeError, match="psum_with_feedback: codec='int4h': .*: compression='int4h'"):
        taco_jax.psum_with_feedback(jnp.ones(2), "tp", codec="int4h")
