"""What the vendors' tools print, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from skyfab._util import schema
from skyfab.host.ask.gpu_tools import ToolFailed, amd, apple, nvidia
from skyfab.inspect.survey import LIMITS, Survey

GPU = "0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 1024, 37, 45, 550.54.15, 0x0000000000000000, 0\n"
BASE = {"os": "Debian", "kernel": "6", "python": "3.11", "cpus": 2}


def tool(gpus: str, processes: str = "") -> Callable[[list[str]], str]:
    return lambda words: processes if "compute-apps" in words[1] else gpus


def survey(gpus: object) -> Survey:
    return schema.parse(Survey, json.loads(json.dumps({**BASE, "gpus": gpus})), LIMITS)


def test_a_gpu_of_nvidia() -> None:
    (gpu,) = survey(nvidia(tool(GPU, "GPU-1, 1, 500\nGPU-2, 1, 500\n"))).gpus
    assert (gpu.index, gpu.name, gpu.use, gpu.temperature, gpu.driver) == (
        0,
        "NVIDIA H100 80GB HBM3",
        37,
        45,
        "550.54.15",
    )
    assert gpu.memory_free == (81559 - 1024) * 1024**2
    (process,) = gpu.processes
    assert (process.pid, process.memory) == (1, 500 * 1024**2)
    assert process.user and process.command, "process 1 is there"
    assert gpu.is_busy and gpu.throttled == () and gpu.ecc_errors == 0


def test_what_nvidia_smi_cannot_know_is_none() -> None:
    text = "0, GPU-1, GeForce GT 710, 2048, 3, [N/A], [Not Supported], 470.1, [N/A], [N/A]\n"
    (gpu,) = survey(nvidia(tool(text, "No running processes found\n"))).gpus
    assert (gpu.use, gpu.temperature, gpu.ecc_errors, gpu.throttled) == (None, None, None, ())
    assert not gpu.is_busy


def test_a_throttled_gpu_says_why() -> None:
    text = GPU.replace("0x0000000000000000", "0x0000000000000024")
    assert survey(nvidia(tool(text))).gpus[0].throttled == ("its power limit", "its temperature")
    idle = GPU.replace("0x0000000000000000", "0x0000000000000001")
    assert survey(nvidia(tool(idle))).gpus[0].throttled == (), "idle is fine"


@pytest.mark.parametrize("text", ["Unable to determine the device handle for GPU\n", "a, b\n"])
def test_output_that_is_something_else(text: str) -> None:
    with pytest.raises(ToolFailed, match="unexpected output"):
        nvidia(tool(text))


def test_gpus_of_amd_and_apple() -> None:
    card = {
        "Card series": "AMD Instinct MI210",
        "GPU use (%)": "12",
        "Temperature (Sensor edge) (C)": "38.0",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "10960896",
    }
    (gpu,) = survey(amd(lambda words: json.dumps({"card0": card, "system": {"Driver version": "6.1"}}))).gpus
    assert (gpu.name, gpu.use, gpu.temperature) == ("AMD Instinct MI210", 12, 38)
    assert gpu.memory_free == 68702699520 - 10960896
    displays = {"SPDisplaysDataType": [{"sppci_model": "Apple M3 Max", "sppci_cores": "40"}]}
    (gpu,) = survey(apple(lambda words: json.dumps(displays))).gpus
    assert (gpu.name, gpu.memory, gpu.is_busy) == ("Apple M3 Max", None, False)
