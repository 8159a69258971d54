"""Mosaic's kernels for Blackwell: those that rotate need Hopper's matrix instruction, the others compile.

In processes of their own: XLA compiles the Mosaic kernels of a process for the GPU of its first one.
"""

import json
import os
import subprocess
import sys

from helpers import REPOSITORY


def test_blackwell_compiles_what_does_not_rotate(tmp_path):
    command = [sys.executable, "experiments/kernel_targets.py", "--out", tmp_path, "--backends", "mosaic"]
    command += ["--targets", "90,100", "--codecs", "taco,mxfp4", "--operations", "encode,decode"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=500)
    found = json.loads((tmp_path / "summary.json").read_text())
    for operation in ("encode", "decode"):
        hopper, blackwell = (found["mosaic"][arch]["bfloat16"] for arch in ("sm_90a", "sm_100a"))
        assert hopper["taco"][operation]["spilled"] == hopper["mxfp4"][operation]["spilled"] == 0
        assert "wgmma" in blackwell["taco"][operation]["reason"]
        assert blackwell["mxfp4"][operation]["spilled"] == 0
        assert 0 < blackwell["mxfp4"][operation]["shared"] <= 227 * 1024
    assert "wgmma" in found["nvlink"]["sm_100a"]["sum, taco"]["reason"]
    assert found["nvlink"]["sm_90a"]["sum, taco"]["spilled"] == 0
