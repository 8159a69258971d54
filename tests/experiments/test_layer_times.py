"""experiments/layer_times.py on a listing made by hand: a layer's kernels, and the device that waits least."""

import sys

import pytest
from helpers import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "experiments"))
import layer_times

# (name, microseconds) of two forward layers, then two backward ones, each with the forward's attention again.
STEP = (
    *(("sdpa_fprop", 10), ("nvjet_a", 20), ("nvlink_all_reduce_mosaic", 5)) * 2,
    *(("sdpa_fprop", 10), ("sdpa_bprop", 30), ("nvjet_b", 40)) * 2,
)


def listing(path, wait):
    lines, start = ["device,stream,start_us,length_us,kernel"], {0: 0.0, 1: 0.0}
    for device in (0, 1):
        for name, length in STEP:
            if "nvlink" in name and device == 0:
                lines.append(f"/device:GPU:0,S,{start[0]},{wait},MultiGpuBarrierKernel(long)")
                start[0] += wait
            lines.append(f"/device:GPU:{device},S,{start[device]},{length},{name}<int>(x)")
            start[device] += length
    path.write_text("\n".join(lines) + "\n")


def test_layers_are_told_apart(tmp_path):
    listing(tmp_path / "kernels-a.csv", wait=7)
    kernels = layer_times.slowest(layer_times.read(tmp_path / "kernels-a.csv"))
    assert not any("Barrier" in kernel.name for kernel in kernels)  # the device that waits for nobody
    forward, backward = layer_times.layers(kernels, False), layer_times.layers(kernels, True)
    assert (len(forward), layer_times.period(forward)) == (1, 35)
    assert (len(backward), layer_times.period(backward)) == (1, 80)
    assert layer_times.by_kind(forward) == {"products": 30, "sums": 5, "waits before sums": 0, "all else": 0}
    assert layer_times.longest(backward, 1)[0].split() == ["40.0", "nvjet_b"]


def test_products_wait_for_the_slowest_gpu_between_two_sums():
    """By hand: 10 and 14 us before the sum, 30 and 20 behind it: 44 where the mean is 37."""
    kernel = layer_times.Kernel
    first = [kernel(0, 10, "nvjet_a"), kernel(10, 5, "ncclDevKernel_AllReduce"), kernel(20, 30, "sdpa_bprop")]
    second = [kernel(0, 8, "nvjet_a"), kernel(8, 6, "gemm"), kernel(14, 1, "nvlink_all_reduce_mosaic")]
    second += [kernel(15, 9, "MultiGpuBarrierWithNcclKernel"), kernel(25, 20, "sdpa_bprop")]
    assert layer_times.waiting({"0": first, "1": second}) == pytest.approx(44 / 37 - 1)
    with pytest.raises(ValueError, match="not of whole steps"):
        layer_times.waiting({"0": first, "1": second[:2]})


def test_waits_are_a_kind_and_cost_is_beyond_free(tmp_path):
    for name, wait in (("free", 0), ("a", 7)):
        listing(tmp_path / f"kernels-{name}.csv", wait=wait)
    first = {name: layer_times.read(tmp_path / f"kernels-{name}.csv")["/device:GPU:0"] for name in ("free", "a")}
    assert layer_times.by_kind(layer_times.layers(first["a"], False))["waits before sums"] == 7
    rows = [line.split(" | ") for line in layer_times.table(first)]
    assert [row[3] for row in rows if row[0] == "| a"] == ["7", "0"]
