"""The command: what it prints and writes, one line for what it refuses, and the measurement on emulated devices."""

import dataclasses
import json
import os
import re
import resource
import subprocess
import sys

import pytest
from helpers import REPOSITORY

from taco_jax.config import TrainConfig, cli, to_dict
from taco_jax.forecast import command, hardware, links, measure
from taco_jax.forecast.constants import load

SEVEN = ("--config", str(REPOSITORY / "experiments/qwen7b.py"))
ON = (*SEVEN, "--gpu", "H200", "--link", "host")


def test_a_step(tmp_path, capsys):
    file, picture = tmp_path / "f.json", tmp_path / "p.png"
    given = [*ON, "--chains", "1", "--json", str(file), "--plot", str(picture)]
    assert cli.run(command.main, given) == 0
    text = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "recommendation: " + found["recommendation"]["text"] in text
    assert found["recommendation"]["codec"] == "int6h" and picture.stat().st_size > 10_000
    # experiments/results/qwen7b_tp4_kernels measured 1.72x, in one chain.
    assert found["codecs"]["int6h"]["speedup"] == pytest.approx(1.72, rel=0.1)
    assert found["exact"]["ms"] > found["codecs"]["taco"]["ms"] > found["ceiling"]["ms"]
    sites = found["codecs"]["taco"]["sites"].values()
    parts = sum(part[key] for part in sites for key in ("products", "memory", "codec", "messages"))
    assert parts == pytest.approx(found["codecs"]["taco"]["ms"])
    for line in ("layers/mlp/up", "the ceiling", "how sure", "accuracy", "it no longer pays"):
        assert line in text


def test_a_first_token_and_another_loss(capsys):
    given = (*SEVEN, "--gpu", "l4", "--link", "12GB/s,15us", "--ttft", "8192", "--batch", "2", "--chains", "1")
    assert cli.run(command.main, [*given, "--loss", "0.1%", "--codecs", "int8h;int4h,block=32;mxfp4"]) == 0
    text = capsys.readouterr().out
    assert "first token of 2 x 8,192 tokens, tp 4" in text and "recommendation: int8h: " in text
    assert "int4h,block=32" in text and "no record" in text and "assumed: Triton kernels" in text


@pytest.mark.parametrize("prompt", [(), ("--ttft", "8192")])
def test_exact_of_one_chain_stands_beside_exact_of_several(prompt, tmp_path, capsys):
    def found(*given):
        file = tmp_path / "f.json"
        assert cli.run(command.main, [*ON, *prompt, *given, "--json", str(file)]) == 0
        return json.loads(file.read_text()), capsys.readouterr().out

    (auto, text), (one, of_one) = found(), found("--chains", "1")
    assert auto["exact"]["chains"] == 2 and one["exact"]["chains"] == auto["exact_one_chain"]["chains"] == 1
    assert auto["exact_one_chain"]["ms"] == one["exact"]["ms"] > auto["exact"]["ms"]
    assert re.search(rf"^exact, one chain +{one['exact']['ms']:.1f} +0\.\d\dx", text, re.M)
    assert "exact_one_chain" not in one and "exact, one chain" not in of_one


@pytest.mark.parametrize(
    "given, codec, said",
    [
        (("--link", "host"), "int8h", ""),
        (("--link", "host", "--codecs", "auto:int6h"), "int8h:int6h", "auto takes int8h all the same"),
        (("--link", "host", "--ttft", "8192"), "int6h", ""),
        (("--link", "nvlink", "--ttft", "8192"), "int8h", ""),
        (("--link", "host", "--codecs", "int6h"), "int6h", "auto takes int8h, the fewest bytes whose recorded change"),
    ],
)
def test_auto_is_the_codec_of_its_use(given, codec, said, capsys):
    codecs = () if "--codecs" in given else ("--codecs", "auto")
    assert cli.run(command.main, [*SEVEN, "--gpu", "H200", *given, *codecs]) == 0
    text = capsys.readouterr().out
    assert re.search(rf"^{codec} +\d", text, re.M) and (said in text if said else "auto" not in text)


def test_over_hosts_and_at_scale(tmp_path, capsys):
    hosts = ("--mesh.dp", "2", "--hosts", "2", "--between", "100Gb/s")
    assert cli.run(command.main, [*ON, *hosts]) == 0
    assert "2 hosts: 12.5 GB/s from a host" in capsys.readouterr().out
    file = tmp_path / "s.json"
    given = (
        *SEVEN,
        "--gpu",
        "H100",
        "--link",
        "nvlink",
        "--between",
        "25Gb/s",
        "--scale",
        "8..16",
        "--json",
        str(file),
    )
    assert cli.run(command.main, given) == 0
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    assert found["pays"]["int4h"]["words"].startswith("pays") and found["pays"]["int4h"]["from_to"][1] == 16
    assert all(f"{way}: {pays['words']}" in text for way, pays in found["pays"].items()) and found["what"] in text
    assert {p["gpus"] for p in found["points"]} == {8, 16}


def test_a_hugging_face_folder(tmp_path, capsys):
    shape = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 2, "rms_norm_eps": 1e-5,
        "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rope_theta": 1e4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    given = ["--model", str(tmp_path), "--mesh.tp", "8", "--gpu", "H100", "--link", "pcie5x16", "--ttft", "4096"]
    assert cli.run(command.main, given) == 0
    assert "8 x H100" in capsys.readouterr().out
    assert cli.run(command.main, [*given[2:], "--model", str(tmp_path / "no")]) == 2
    assert "must be a Hugging Face folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert cli.run(command.main, given) == 2
    assert capsys.readouterr().err.count("config.json") == 1
    # A run is read as inference reads it, and says what it lacks.
    (tmp_path / "config.json").write_text(json.dumps(to_dict(TrainConfig())))
    assert cli.run(command.main, given) == 2
    assert "has no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--gpu", "H2000", "--link", "host"], "nearest are H200"),
        (["--gpu", "H2000", "--gpu-tflops", "-1", "--link", "host"], "--gpu-tflops=-1: must be above 0"),
        (["--link", "host"], "--gpu: name the GPU"),
        (["--gpu", "L4"], "--link: say what joins"),
        (["--gpu", "L4", "--link", "host", "--lora.rank", "8"], "lora.rank=8: the forecast is of steps that train"),
        (["--gpu", "L4", "--link", "nvlink"], "L4 has no NVLink"),
        (["--gpu", "L4", "--link", "nvlnk"], "did you mean 'nvlink'?"),
        (["--gpu", "L4", "--link", "0GB/s"], "a speed must be from"),
        (["--gpu", "L4", "--link=-12GB/s"], "'-12GB/s': is no speed: a number, then GB/s"),
        (["--gpu", "L4", "--link", "12GiB/s"], "'12GiB/s': is no speed: a number, then GB/s"),
        (["--gpu", "L4", "--link", "12gb/s"], "'12gb/s': is no speed: a number, then GB/s"),
        (["--gpu", "L4", "--link", "12GB/s,15"], "then perhaps a latency in us"),
        (["--gpu", "L4", "--link", "host", "--between", "1GB/s"], "--between 1GB/s: give --hosts 4, or --scale"),
        (["--gpu", "L4", "--link", "host", "--hosts", "2", "--between", "host"], "--between 'host': must be a speed"),
        (["--gpu", "L4", "--link", "host", "--per-host", "4"], "--per-host 4: is of studies of many GPUs"),
        (["--gpu", "L4", "--link", "host", "--batch", "4"], "--batch 4: is of prompts; give --ttft"),
        (["--gpu", "L4", "--link", "host", "--json", "/"], "--json /: is a folder"),
        (["--gpu", "L4", "--link", "host", "--scale", ""], "--scale '': must be a range"),
        (["--gpu", "L4", "--link", "host", "--scale", "8", "--codecs", "int8h"], "--codecs int8h: --scale compares"),
        (["--gpu", "L4", "--link", "host", "--scale", "8", "--hosts", "4"], "--hosts 4: --scale has as many hosts"),
        (["--gpu", "L4", "--link", "host", "--between", "1GB/s", "--scale", "12..64"], "12 GPUs are no whole number"),
        (["--gpu", "L4", "--link", "host", "--between", "1GB/s", "--scale", "8..64", "--per-host", "3"], "hosts of 3"),
        (["--gpu", "L4", "--mesh.tp", "1", "--plot", "x.png"], "nothing is sent in a codec here"),
        (["--gpu", "L4", "--link", "1GB/s,1000ms"], "a latency must be from"),
        (["--gpu", "L4", "--link", "host", "--hosts", "3", "--between", "1GB/s"], "--hosts 3: must divide the 4"),
        (["--gpu", "L4", "--link", "host", "--hosts", "2"], "say what joins them, --between"),
        (["--gpu", "L4", "--link", "host", "--hosts", "0"], "--hosts 0: must be at least 1"),
        (["--gpu", "L4", "--link", "host", "--rails", "2"], "--rails 2: are cards between hosts"),
        (["--gpu", "L4", "--link", "host", "--codecs", "tako"], "did you mean 'taco'?"),
        (["--gpu", "L4", "--link", "host", "--codecs", "none"], "exact is always shown"),
        (["--gpu", "L4", "--link", "host", "--loss", "much"], "must be a share in percent"),
        (["--gpu", "L4", "--link", "host", "--scale", "8..64"], "say what joins the hosts"),
        (["--gpu", "L4", "--link", "host", "--between", "1GB/s", "--scale", "1"], "the model's state fits on none"),
        (["--gpu", "L4", "--link", "host", "--scale", "8", "--ttft", "8"], "--scale is of training steps"),
        (["--gpu", "L4", "--link", "host", "--plot", "x.bmp"], "must end with .png"),
        (["--gpu", "L4", "--link", "host", "--json", "/no/such/f.json"], "there is no folder"),
        (["--gpu", "L4", "--link", "host", "--mesh.tp", "3"], "tp 3 does not divide"),
        (["--gpu", "L4", "--link", "host", "--mesh.tpp", "3"], "did you mean --mesh.tp?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(flags, says, capsys):
    assert cli.run(command.main, [*SEVEN, *flags]) == 2
    out, err = capsys.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_names_of_gpus():
    assert hardware.find("NVIDIA A100-SXM4-80GB").name == "A100 80GB"
    assert hardware.find("nvidia h100 80gb hbm3").name == hardware.find("H100").name == "H100 80GB HBM3"
    assert hardware.find("H200 NVL").flops == 835e12 and hardware.find("NVIDIA H200").flops == 989.4e12
    assert hardware.find("L40S").name == "L40S" and hardware.find("cpu") is None
    assert [hardware.find(n).kernels for n in ("H200", "L4", "B200")] == ["mosaic", "triton", "triton"]
    other = hardware.gpu("Foo", 100)
    assert other.flops == 100e12 and len(other.assumed) == 2 and len(hardware.gpu("Foo", 100, 1000).assumed) == 1


def test_speeds_of_links():
    h200 = hardware.gpu("H200")
    gb_s = lambda text: links.parse(text, h200).gb_s(2)
    assert [gb_s("100Gb/s"), gb_s("12GB/s,15us"), gb_s("500MB/s")] == [12.5, 12, 0.5]
    assert [gb_s("100Gbps"), gb_s("1.6Tb/s"), gb_s("2 TB/s, 500 ns"), gb_s("800Mb")] == [12.5, 200, 2000, 0.1]
    assert links.between("100Gb/s,10us").hop == links.parse("100Gb/s,10us", h200).hop
    assert gb_s("pcie4x16") == pytest.approx(31.5 * 256 / 280, rel=0.01) and gb_s("pcie5x8") == gb_s("pcie4x16")
    assert links.parse("12GB/s,15us", h200).all_reduce(4, 12e9) == pytest.approx(1.5 + 60e-6)
    half = hardware.gpu("A100")
    assert links.parse("nvlink", half).gb_s(4) == pytest.approx(gb_s("nvlink") * 300 / 450 * load()["links"]["nvlink"]
                                                                ["hop"]["4"]["gb_s"] / gb_s("nvlink"))  # fmt: skip


def test_exact_sums_with_nvls_are_as_fast_as_published(capsys):
    """Published: 316 us for 64 MiB and 561 us for 128 MiB on eight H100. Everything but exact sums is as without."""
    h100, h200 = hardware.gpu("H100"), hardware.gpu("H200")
    nvls, ring = links.parse("nvls", h100), links.parse("nvlink", h100)
    for mib, us in ((64, 316), (128, 561)):
        assert nvls.all_reduce(8, mib << 20) == pytest.approx(1e-6 * us, rel=0.12)
    assert nvls.exact_gb_s(8) == 480 and nvls.exact_gb_s(2) == nvls.exact_gb_s(4) == 370
    assert (nvls.hop, nvls.kernel, nvls.kind) == (ring.hop, ring.kernel, ring.kind)
    found = {}
    for link in ("nvlink", "nvls"):
        assert cli.run(command.main, [*SEVEN, "--mesh.tp", "4", "--gpu", "H200", "--link", link]) == 0
        text = capsys.readouterr().out
        found[link] = float(re.search(r"^taco +[\d.]+ +([\d.]+)x", text, re.M)[1])
        said = "multicast (NVLS) off; --link nvls has it on" if link == "nvlink" else "published for sums with NVLS"
        assert said in text
    assert found["nvls"] < found["nvlink"] and links.parse("nvls", h200).exact_gb_s(8) == 480
    assert cli.run(command.main, [*SEVEN, "--gpu", "A100", "--link", "nvls"]) == 2
    assert "A100 80GB has no sums in NVSwitches, which Hopper brought; use --link nvlink" in capsys.readouterr().err


def test_it_is_there_within_seconds_and_starts_no_device(tmp_path):
    code = (
        "import sys, jax\n"
        "from taco_jax.forecast.command import main\n"
        f"main({[*ON]!r})\n"
        "from jax._src import xla_bridge\n"
        "sys.exit(3 if xla_bridge._backends else 0)\n"
    )
    # The second time, with modules that the first one compiled, as a user has them.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    for _ in range(2):
        before = used()
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, cwd=REPOSITORY, env=env, timeout=120)
        seconds = used() - before
    assert done.returncode == 0, done.stderr
    assert "recommendation" in done.stdout and seconds < 5


def test_measuring_the_emulator_replaces_assumptions(tmp_path, capsys):
    file = tmp_path / "m.json"
    given = ["--devices", "cpu:8", "--measured", str(file)]
    assert cli.run(command.main, ["--measure", *given]) == 0
    assert f"written to {file}" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["ranks"] == 8 and found["link"]["exact"]["gb_s"] > 0 and found["copy_gb_s"] > 0
    given = [*SEVEN, "--link", "measured", "--measured", str(file)]
    assert cli.run(command.main, given) == 0
    text = capsys.readouterr().out
    assert "measured here: a product" in text and "link measured" in text and "assumed: cpu reaches" not in text
    # Another GPU takes the link alone.
    assert cli.run(command.main, [*given, "--gpu", "L4"]) == 0
    text = capsys.readouterr().out
    assert "measured here" not in text and "assumed: L4 reaches" in text and "link measured" in text
    file.write_text("{}")
    assert cli.run(command.main, given) == 2
    assert "is no measurement" in capsys.readouterr().err


def test_a_measured_kernel_over_nvlink_is_used(tmp_path, capsys):
    """It is recovered from what it takes, and a machine that measured one is forecast with it."""
    kernel = links.Kernel(us=20.0, gb_s=300.0, ns=2e-3)
    points = [(b * n, n, kernel.seconds(b * n, n)) for b in (1.0, 0.5) for n in (1 << 19, 1 << 25)]
    found = measure._kernel(points)
    assert found == pytest.approx(dataclasses.asdict(kernel), rel=1e-6)

    link = {"exact": {"us": 50.0, "gb_s": 275.0}, "hop": {"us": 58.0, "gb_s": 350.0}}
    machine = {"hardware": "2 x NVIDIA H200", "gpu": "NVIDIA H200", "ranks": 2, "product_flops": 7.8e14,
               "product_share": 0.8, "copy_gb_s": 4000.0, "codec_share": 0.6, "what": []}  # fmt: skip
    speed = {}
    for name, of in (("without", link | {"kernel": None}), ("with", link | {"kernel": found})):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(machine | {"link": of}))
        out = tmp_path / f"{name}_out.json"
        given = [*SEVEN, "--mesh.tp", "2", "--link", "measured", "--measured", str(file), "--json", str(out)]
        assert cli.run(command.main, given) == 0
        speed[name] = json.loads(out.read_text())["codecs"]["int4h"]["speedup"]
    assert speed["with"] > speed["without"]
    file.write_text(json.dumps(machine | {"link": link | {"kernel": found | {"ns": -1.0}}}))
    assert cli.run(command.main, given) == 2
    assert "link.kernel is no rate" in capsys.readouterr().err


def test_nothing_was_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli.run(command.main, [*SEVEN, "--gpu", "L4", "--link", "measured"]) == 2
    assert "nothing has been measured on this machine" in capsys.readouterr().err


def test_without_tensor_parallelism_gradients_alone_are_compared(capsys):
    alone = ("--mesh.tp", "1", "--mesh.dp", "8")
    assert cli.run(command.main, [*ON, *alone]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^(\S.*\S) +\d+\.\d +\d\.\d\dx", text, re.M) == ["exact", "gradients int8h", "nothing sent"]
    # Their record, by which `auto` takes int8h there.
    assert re.search(r"recommendation: gradients int8h: .* by three_axes", text)
    assert cli.run(command.main, [*ON, *alone, "--data-parallel.gradients", "sdp4"]) == 0
    assert "recommendation: exact: gradients sdp4 would gain " in capsys.readouterr().out
    assert cli.run(command.main, [*ON, *alone, "--data-parallel.gradients", "none"]) == 0
    assert "recommendation: exact: no codec gains 2 % here" in capsys.readouterr().out


def test_a_plan_is_a_row_of_its_own(tmp_path, capsys):
    file, picture = tmp_path / "f.json", tmp_path / "p.svg"
    given = [*ON, "--compression.plan", "layers/mlp/*", "int4h", "--codecs", "int8h;int4h", "--json", str(file)]
    assert cli.run(command.main, [*given, "--plot", str(picture)]) == 0
    assert "the plan" in capsys.readouterr().out and picture.stat().st_size > 10_000
    ms = {name: way["ms"] for name, way in json.loads(file.read_text())["codecs"].items()}
    assert ms["int4h"] < ms["the plan"] < ms["int8h"]
    assert cli.run(command.main, [*ON, "--compression.plan", "*", "int8h", *given[-4:]]) == 0
    ms = {name: way["ms"] for name, way in json.loads(file.read_text())["codecs"].items()}
    assert ms["the plan"] == ms["int8h"] > ms["int4h"]


@pytest.mark.parametrize(
    "mesh, gpu, fits",
    [(("--mesh.tp", "4"), "L4", False), (("--mesh.tp", "4"), "H200", True),
     (("--mesh.tp", "1", "--ttft", "8192"), "A10", True), (("--mesh.tp", "1", "--ttft", "8192"), "B200", True)],
)  # fmt: skip
def test_what_does_not_fit_the_memory_is_said(mesh, gpu, fits, capsys):
    """7.6e9 weights: 16 bytes each in training, on four GPUs 30 GB; 2 bytes before a first token, 15 GB."""
    assert cli.run(command.main, [*SEVEN, "--gpu", gpu, "--link", "host", *mesh]) == 0
    text = capsys.readouterr().out
    assert "7.62B parameters" in text and ("does not fit: about" not in text) == fits


def test_small_models_and_other_ranks_are_said_to_be_less_sure(tmp_path, capsys):
    rate = {"us": 10.0, "gb_s": 20.0}
    found = {"hardware": "2 x L4", "gpu": "NVIDIA L4", "ranks": 2, "product_flops": 1e14, "product_share": 0.8,
             "copy_gb_s": 250.0, "codec_share": 0.6, "link": {"exact": rate, "hop": rate}, "what": []}  # fmt: skip
    file = tmp_path / "m.json"
    file.write_text(json.dumps(found))
    small = ("--config", str(REPOSITORY / "experiments/gpt2_124m.py"), "--mesh.tp", "4")
    assert cli.run(command.main, [*small, "--link", "measured", "--measured", str(file)]) == 0
    text = capsys.readouterr().out
    assert "models of 350M parameters and fewer" in text and "4 ranks share the link as the 2 that were mea" in text


@pytest.mark.parametrize(
    "change",
    [{"gpu": 2}, {"ranks": 0}, {"ranks": 2.5}, {"copy_gb_s": float("nan")}, {"product_share": "0.8"}, {"what": [1]},
     {"codec_share": True}, {"link": [1]}, {"link": {"exact": {"us": 1.0, "gb_s": 1.0}}}],
)  # fmt: skip
def test_a_file_that_measured_nothing_is_refused(change, tmp_path, capsys):
    rate = {"us": 10.0, "gb_s": 20.0}
    found = {"hardware": "2 x L4", "gpu": "NVIDIA L4", "ranks": 2, "product_flops": 1e14, "product_share": 0.8,
             "copy_gb_s": 250.0, "codec_share": 0.6, "link": {"exact": rate, "hop": rate}, "what": []}  # fmt: skip
    file = tmp_path / "m.json"
    for content in (found | change, None, [found]):
        file.write_text(json.dumps(content))
        assert cli.run(command.main, [*SEVEN, "--link", "measured", "--measured", str(file)]) == 2
        out, err = capsys.readouterr()
        assert "is no measurement" in err and err.count("\n") == 1 and not out


def test_small_messages_are_named(capsys):
    assert cli.run(command.main, [*ON, "--data.sequence-length", "64", "--global-batch", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("layers' messages are too small and go exactly") == 4
    assert "recommendation: exact: no codec gains 2 % here" in text
