"""Devices that outlive their program: what it has kept by name is there for a later one, byte for byte."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab.lab import Lab
from skyfab.pool import attach_device

torch = pytest.importorskip("torch")

from skyfab.host.device.memory import move_out, restore  # noqa: E402 - it imports torch

pytestmark = [pytest.mark.lab, pytest.mark.slow]

Attach = Callable[[str], tuple[torch.device, dict[str, Any]]]
Program = Callable[..., subprocess.Popen[str]]
STEPS = """
    import torch
    from torch import nn

    def make(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(device)
        torch.manual_seed(1)  # the device has not made the numbers of the weights
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def train(model, optimizer, device, steps):
        for _ in range(steps):
            loss = model(torch.randn(16, 6, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()
"""
own: dict[str, Any] = {}
exec(textwrap.dedent(STEPS), own)  # the programs of these tests and this one train in the same way


@pytest.fixture(scope="module")
def inventory(lent_lab: Lab) -> sky.Inventory:
    return sky.Inventory.of(lent_lab.inventory)


@pytest.fixture
def attach(inventory: sky.Inventory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attach]:
    """``attach("lab")``: this program attaches to a device, until the end of the test."""
    with ExitStack() as at_end:
        monkeypatch.setattr(attach_device, "atexit", SimpleNamespace(register=at_end.callback))
        yield lambda name: sky.attach_device(name, "all", inventory=inventory, ui="none")


@pytest.fixture
def pool(inventory: sky.Inventory) -> Iterator[Callable[..., sky.Compute]]:
    """``pool()``: a pool of node1, closed at the end of the test, when all devices are stopped."""
    made: list[sky.Compute] = []

    def pool(**options: Any) -> sky.Compute:
        made.append(sky.Compute("node1", inventory=inventory, ui="none", **options).open())
        return made[-1]

    yield pool
    for one in made:
        one.close()
    for run in sky.runs("all", inventory=inventory):
        if run.state == "running":
            run.stop()


@pytest.fixture
def program(lent_lab: Lab, tmp_path: Path, pool: object) -> Iterator[Program]:
    """``program(text)``: another program with a pool of node1, `compute`, and the functions of `STEPS`."""
    made: list[subprocess.Popen[str]] = []

    def start(text: str) -> subprocess.Popen[str]:
        lines = [
            "import os, time, skyfab as sky",
            textwrap.dedent(STEPS),
            'with sky.Compute("node1", ui="none") as compute:',
            textwrap.indent(textwrap.dedent(text), "    "),
        ]
        path = tmp_path / f"program{len(made)}.py"
        path.write_text("\n".join(lines))
        env = {**os.environ, "SKYFAB_INVENTORY": str(lent_lab.inventory)}
        made.append(subprocess.Popen([sys.executable, str(path)], env=env, stdout=subprocess.PIPE, text=True))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of a program."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the program ended with {process.wait()}"
    return line.strip()


def last_line(inventory: sky.Inventory, name: str = "lab") -> str:
    """What `skyfab runs` and `skyfab top` show of a device."""
    return next((run.last for run in sky.runs("node1", inventory=inventory) if run.name == name), "")


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())


# ---- programs come and go


def test_a_later_program_goes_on_where_the_first_has_ended(
    program: Program, attach: Attach, inventory: sky.Inventory
) -> None:
    """With its random numbers, dropout and the counts of the optimizer: as if there had been one program."""
    first = program("""
        device = compute.device("cpu", name="lab", keep="10m")
        model, optimizer = make(device)
        sky.keep(device, model=model, optimizer=optimizer, step=0)
        train(model, optimizer, device, 5)
        print(bytes(model[0].weight.detach().cpu().numpy()).hex())
    """)
    weight = said(first)
    assert first.wait() == 0
    shown = last_line(inventory)
    assert shown.startswith("cpu: kept until") and shown.endswith("model, optimizer, step (0.0 MB)")
    model, _ = own["make"]("meta")
    device, kept = attach("lab")
    assert "in use by" in last_line(inventory)
    assert raw(kept["model"]["0.weight"]).hex() == weight
    assert kept["step"] == 0
    model.load_state_dict(kept["model"], assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(kept["optimizer"])
    found = own["train"](model, optimizer, device, 5)
    expected, other = own["make"]("cpu")
    assert found == pytest.approx(own["train"](expected, other, "cpu", 10), abs=1e-5)
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].cpu(), tensor)
    for number, state in other.state_dict()["state"].items():
        assert optimizer.state_dict()["state"][number]["step"] == state["step"] == 10
    assert model[0].weight.untyped_storage().data_ptr() == kept["model"]["0.weight"].untyped_storage().data_ptr()


def test_a_killed_program(program: Program, attach: Attach) -> None:
    """It is killed in the middle of its steps. What it has kept is there, and all else is freed."""
    killed = program("""
        device = compute.device("cpu", name="lab", keep="10m")
        model, optimizer = make(device)
        train(model, optimizer, device, 1)
        fixed = torch.arange(1000, device=device)
        sky.keep(device, model=model, optimizer=optimizer, fixed=fixed)
        others = [torch.ones(1000, device=device) for _ in range(100)]
        print("ready", flush=True)
        while True:
            train(model, optimizer, device, 1)
    """)
    assert said(killed) == "ready"
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(0.5)
    killed.send_signal(signal.SIGKILL)
    device, kept = attach("lab")  # waits until the host has noticed
    assert raw(kept["fixed"]) == raw(torch.arange(1000))
    assert kept["model"].keys() == own["make"]("cpu")[0].state_dict().keys()
    assert all(tensor.cpu().isfinite().all() for tensor in kept["model"].values())
    tensors = len(kept["model"]) + 2 * len(kept["optimizer"]["state"]) + 1
    assert sky.memory(device)["tensors"] <= tensors + len(kept["optimizer"]["state"])


def test_ids_of_programs_do_not_collide(program: Program, attach: Attach) -> None:
    first = program("""
        device = compute.device("cpu", name="lab")
        kept = [torch.full((50,), float(n), device=device) for n in range(200)]
        sky.keep(device, kept=kept)
    """)
    assert first.wait() == 0
    device, kept = attach("lab")
    others = [torch.full((50,), -1.0, device=device) * n for n in range(400)]
    total = torch.stack(others).sum()
    assert [tensor.sum().item() for tensor in kept["kept"]] == [50.0 * n for n in range(200)]
    assert total.item() == -50.0 * sum(range(400))


def test_only_one_program_uses_it(
    program: Program, attach: Attach, inventory: sky.Inventory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one is told who does; when that one has ended, it takes over."""
    holder = program("""
        device = compute.device("cpu", name="lab")
        sky.keep(device, x=torch.ones(3, device=device))
        print(os.getpid(), flush=True)
        time.sleep(600)
    """)
    pid = said(holder)
    used = rf"in use by \S+@\S+ \(process {pid}\)"
    with pytest.raises(sky.UsageError, match=used) as error:
        sky.attach_device("lab", "all", inventory=inventory, ui="plain")
    hint = "end that program, or delete the device with all that it keeps: skyfab stop"
    assert hint in str(error.value)
    assert re.search(rf"{used}.*; waiting 15 s for that program to end", capsys.readouterr().err)
    holder.kill()
    assert attach("lab")[1]["x"].tolist() == [1, 1, 1]


def test_a_connection_that_breaks(pool: Any, attach: Attach, lent_lab: Lab) -> None:
    """As when a laptop is closed: the program loses the device, and the device keeps what it has."""
    if lent_lab.kind != "namespace":
        pytest.skip("needs hosts that can be cut off")
    compute = pool(lease=2)
    device = compute.device("cpu", name="lab")
    x = torch.arange(5, device=device)
    sky.keep(device, x=x)
    lent_lab["node1"].cut()
    try:
        with pytest.raises(sky.SkyfabError):
            x.tolist()
    finally:
        lent_lab["node1"].restore()
    compute.close()
    assert attach("lab")[1]["x"].tolist() == [0, 1, 2, 3, 4]


# ---- names and ends


def test_names(pool: Any, attach: Attach, inventory: sky.Inventory) -> None:
    compute = pool()
    compute.device("cpu", name="lab")
    other = sky.Compute("node1", inventory=inventory, ui="none")
    with other, pytest.raises(sky.UsageError, match="a run named 'lab' is already running") as error:
        other.device("cpu", name="lab")
    assert 'sky.attach_device("lab")' in str(error.value.hint)
    with pytest.raises(sky.UsageError, match="no run 'other'") as error:
        attach("other")
    assert error.value.hint == "these are running: lab"
    with pytest.raises(sky.UsageError, match="no run 'lba'") as error:
        attach("lba")
    assert error.value.hint == "did you mean lab?"
    for option in ({"name": "a\nb"}, {"name": "other", "keep": "8 hours"}, {"name": "other", "idle": "-1s"}):
        with pytest.raises(sky.UsageError, match=r"invalid (name|keep=|idle=)"):
            compute.device("cpu", **option)


def test_stopped(pool: Any, attach: Attach, inventory: sky.Inventory) -> None:
    compute = pool()
    device = compute.device("cpu", name="lab")
    x = torch.ones(3, device=device)
    (run,) = [run for run in sky.runs("node1", inventory=inventory) if run.state == "running"]
    run.stop()
    with pytest.raises(sky.WorkerDied):
        x.tolist()
    with pytest.raises(sky.UsageError, match="node1: the device lab was stopped") as error:
        attach("lab")
    assert error.value.hint == 'make it again: compute.device(…, name="lab")'
    assert torch.ones(2, device=compute.device("cpu", name="lab")).tolist() == [1, 1], "the name is free again"


def test_the_time_is_over(pool: Any, attach: Attach, inventory: sky.Inventory) -> None:
    compute = pool()
    device = compute.device("cpu", name="short", keep=1)
    sky.keep(device, x=torch.ones(3, device=device))
    compute.close()
    until(lambda: "freed" in last_line(inventory, "short"))
    (run,) = [run for run in sky.runs("node1", inventory=inventory) if run.name == "short"]
    until(lambda: run.status == "done")
    with pytest.raises(sky.UsageError, match=r"'short' has ended: .*no program has attached to it in time"):
        attach("short")


def test_another_torch_here(pool: Any, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = pool()
    device = compute.device("cpu", name="lab")
    sky.keep(device, x=torch.ones(3, device=device))
    compute.close()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        with pytest.raises(sky.HostUnfit, match=r"this program has 2\.99\.0") as error:
            attach("lab")
    assert f"pip install torch=={torch.__version__.partition('+')[0]}" in str(error.value.hint)
    assert attach("lab")[1]["x"].tolist() == [1, 1, 1]


def test_another_version_of_skyfab_here(pool: Any, attach: Attach, lent_lab: Lab) -> None:
    compute = pool()
    compute.device("cpu", name="lab")
    compute.close()
    found = (
        lent_lab["node1"].run(["sh", "-c", "ls ~/.cache/skyfab/bundles/*/skyfab/host/device/wire.py"]).stdout.split()
    )
    paths = [lent_lab["node1"].path(path) for path in found]
    before = [(path, path.read_text(), path.stat().st_mtime) for path in paths]
    try:
        for path, text, _ in before:
            path.write_text(text.replace("= -1\n", "= -8\n"))  # a file of another size would be replaced
        with pytest.raises(sky.UsageError, match="it was started by another version of skyfab"):
            attach("lab")
    finally:
        for path, text, modified in before:
            path.write_text(text)
            os.utime(path, (modified, modified))  # Python recognizes compiled files by size and time


# ---- what is kept


def test_what_is_kept(pool: Any, attach: Attach) -> None:
    compute = pool()
    device = compute.device("cpu", name="lab")
    base = torch.arange(12.0, device=device).view(3, 4)
    values = {
        "rows": [base, base[1], base.t()],
        "bits": torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=device),
        "here": torch.tensor(7),
        "plain": {"lr": 0.1, "betas": (0.9, 0.99), "none": None, 3: "text"},
    }
    sky.keep(device, **values, removed=base)
    sky.keep(device, removed=None)
    base += 1
    compute.close()
    _, kept = attach("lab")
    assert kept.keys() == values.keys()
    assert kept["plain"] == values["plain"]
    assert kept["here"].device.type == "cpu" and kept["here"].item() == 7
    assert kept["bits"].dtype == torch.bfloat16 and kept["bits"].tolist() == [1.5, -2]
    whole, row, turned = kept["rows"]
    assert whole.flatten().tolist() == list(range(1, 13))
    whole[1, 2] = 100
    assert row[2].item() == turned[2, 1].item() == 100, "they share memory as before"


def test_a_program_that_attaches_twice_has_the_same_device_and_cannot_keep_everything(
    pool: Any, attach: Attach
) -> None:
    """It attaches twice when a cell of a notebook is executed again."""
    compute = pool()
    device = compute.device("cpu", name="lab")
    assert compute.device("cpu", name="lab") == device
    sky.keep(device, x=torch.ones(3, device=device))
    found, kept = attach("lab")
    assert found == device and kept["x"].tolist() == [1, 1, 1]
    with pytest.raises(sky.DeviceError, match="cannot contain a set"):
        sky.keep(device, x={1, 2})
    with pytest.raises(sky.UsageError, match="ends with the program"):
        sky.keep(compute.device("cpu"), x=1)


# ---- unused tensors


def test_unused_tensors_are_moved_and_come_back(pool: Any, attach: Attach, inventory: sky.Inventory) -> None:
    compute = pool()
    device = compute.device("cpu", name="lab", idle=1)
    x = torch.arange(1000.0, device=device) * 2
    y, row = x * 2, x.view(10, 100)[3]
    sky.keep(device, x=x)
    until(lambda: "in the memory of the host" in last_line(inventory))
    assert (row + y[300:400]).tolist() == [6.0 * n for n in range(300, 400)], "in the same program"
    assert "in the memory of the host" not in last_line(inventory)
    compute.close()
    until(lambda: "kept until" in last_line(inventory) and "in the memory of the host" in last_line(inventory))
    assert raw(attach("lab")[1]["x"]) == raw(torch.arange(1000.0) * 2)


def test_memory_that_is_moved() -> None:
    """Views, and what autograd has saved, have their values again."""
    x = torch.randn(50, 20, requires_grad=True)
    weight = torch.randn(20, 20)
    y = (x @ weight).sigmoid()
    view, expected = y[3:5].t(), y.detach().clone()
    received = torch.frombuffer(bytearray(64), dtype=torch.uint8)
    moved = move_out([y.detach(), view, weight, received, torch.empty(0)])
    assert sum(copy.nbytes() for _, copy in moved) == 4 * (50 * 20 + 20 * 20)
    assert y.untyped_storage().nbytes() == weight.untyped_storage().nbytes() == 0
    assert received.sum() == 0, "PyTorch cannot free it"
    restore(moved)
    assert not moved and torch.equal(y, expected) and torch.equal(view, expected[3:5].t())
    y.sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, (expected * (1 - expected)) @ weight.t(), atol=1e-6)


def test_memory_that_does_not_come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = torch.arange(10), torch.arange(20)
    moved = move_out(tensors)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("full")

        patch.setattr(torch.UntypedStorage, "copy_", full)
        with pytest.raises(torch.OutOfMemoryError):
            restore(moved)
    restore(moved)
    assert [tensor.tolist() for tensor in tensors] == [list(range(10)), list(range(20))]
