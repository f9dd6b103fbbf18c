"""Kernels that Triton has compiled for one host are used by another: ``python -m pytest --noconftest tests/gpu``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU that torch can use", allow_module_level=True)


@sky.function
def step() -> tuple[float, float]:
    """The seconds of a first compiled step, and its result."""
    import itertools
    import time

    import torch

    widths = range(256, 640, 16)  # kernels of their own for each layer
    layers = [
        torch.nn.Sequential(torch.nn.Linear(a, b), torch.nn.GELU(), torch.nn.LayerNorm(b))
        for a, b in itertools.pairwise([512, *widths])
    ]
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.001)
    compiled = torch.compile(model.cuda())
    torch.cuda.synchronize()
    began = time.perf_counter()
    loss = compiled(torch.ones(64, 512, device="cuda")).square().mean()
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - began, float(loss)


def kernels_of(folder: Path) -> set[str]:
    return {path.name for path in (folder / "compiled").rglob("*.cubin")}


def test_the_second_host_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    hosts = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir(mode=0o700)
        hosts.append(sky.Host(name=name, transport="local", cache=str(tmp_path / name), python=sys.executable))
    with sky.Compute(hosts, image=sky.Image(python=sys.executable), workdir="temp", ui="none") as compute:
        first, expected = compute.submit(step(), on="first").result()
        made = kernels_of(tmp_path / "first")
        assert made
        until = time.monotonic() + 60
        while not kernels_of(tmp_path / "second") >= made and time.monotonic() < until:
            time.sleep(0.1)
        assert kernels_of(tmp_path / "second") >= made
        second, found = compute.submit(step(), on="second").result()
        assert kernels_of(tmp_path / "second") == made
    assert found == expected
    print(f"first compiled step: {first:.1f} s, on the second host: {second:.1f} s, {second / first:.2f}")
