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
COMMANDS = {"advise", "calibrate", "evaluate", "export", "generate", "plot", "prepare", "run", "serve", "tune"}


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


def test_at_most_9_calls_have_more_than_5_positional_arguments():
    assert len(long_calls()) <= 9, "\n".join(long_calls())


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


ENTRY, FACADE = "a command", "a public name that is imported from here"
CONCEPT = "one concept with one seeded fault or test of its own, which several files use"
# Files of less than 60 lines, and the reason why each is a file.
SHORT = {
    "taco_jax": {
        "advise.py": ENTRY,
        "calibrate.py": ENTRY,
        "calibration/plot.py": "a picture, which needs a library of its own",
        "calibration/report.py": "a table of lines, beside the picture",
        "codec/hadamard.py": CONCEPT,
        "codec/stochastic_rounding.py": CONCEPT,
        "collectives/gather_permute.py": CONCEPT,
        "data/prepare/duplicates.py": CONCEPT,
        "compression/copies.py": "a rule that the trainer and the forecast ask",
        "compression/recommended.py": "reads a table that trainer, layers and inference take",
        "compat.py": "all that differs between versions of JAX",
        "evaluate.py": ENTRY,
        "export.py": ENTRY,
        "forecast/constants.py": "imported by all of the forecast, imports nothing of it",
        "forecast/record.py": CONCEPT,
        "generate.py": ENTRY,
        "linen.py": FACADE,
        "models/documents.py": CONCEPT,
        "mesh.py": "imported by everything that has devices",
        "plot.py": ENTRY,
        "prepare.py": ENTRY,
        "run.py": ENTRY,
        "serve.py": ENTRY,
        "tensor_parallel.py": FACADE,
        "train/__main__.py": ENTRY,
        "train/site_stats.py": CONCEPT,
        "tune.py": ENTRY,
    },
    "pallas_kernels": {
        "matmul_all_reduce/support.py": "answers without a GPU, as every package's support.py",
        "nvlink/hardware.py": "asks the driver, imports nothing of ours",
    },
}


@pytest.mark.parametrize("package", PACKAGES)
def test_short_files_have_a_reason(package):
    files = (path for path in (REPOSITORY / package).rglob("*.py") if path.name != "__init__.py")
    short = {str(path.relative_to(REPOSITORY / package)) for path in files if len(path.read_text().splitlines()) < 60}
    without, stale = sorted(short - set(SHORT[package])), sorted(set(SHORT[package]) - short)
    assert not stale, f"listed in SHORT, but not there or longer: {', '.join(stale)}"
    assert not without, f"below 60 lines: {', '.join(without)}: merge them, or say in SHORT why not"


def calls(name: str) -> set[str]:
    """The files in which something of this name is called."""
    found = set()
    for path in own_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
                found.add(str(path.relative_to(REPOSITORY)))
    return found


def test_at_most_6_files_from_a_codecs_flag_to_the_kernel():
    """Each makes the next form of what `--compression.forward` says; in between, objects are handed on whole."""
    forms = {
        "site_compression": "taco_jax/config/settings.py",  # a field of CompressionConfig -> Compression
        "codec_pair": "taco_jax/compression/compression.py",  # its text -> Codec, by `as_codec`
        "Message": "taco_jax/collectives/call.py",  # the codec of the message's direction
        "Format": "taco_jax/compression/dispatch.py",  # as kernels take it; and the choice of the kernel
        "encode_tile": "pallas_kernels/mosaic/kernels.py",
    }
    assert len(forms) + 1 <= 6  # and codec/codec.py, which looks the text up
    assert calls("Message") == {forms["Message"]}
    assert {path for path in calls("Format") if path.startswith("taco_jax")} == {forms["Format"]}
    assert forms["codec_pair"] in calls("as_codec")
    for name in ("site_compression", "codec_pair", "encode_tile"):
        assert f"def {name}(" in (REPOSITORY / forms[name]).read_text()


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_a_verb_or_a_noun(package):
    found = []
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or ".").split()[0]
                if first in ("Of", "As", "What", "Those", "Who", "Whether"):
                    found.append(f"{path.relative_to(REPOSITORY)}: {getattr(node, 'name', 'module')}: {first}")
    assert not found, "\n".join(found)
