"""What a value costs: one message, and one reply that is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.device import tensors

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.lab

STEPS = 5
WAYS: dict[str, Callable[[Any], Any]] = {
    "operators": lambda model: model,
    "region": sky.remote,
    "compiled": lambda model: torch.compile(model, options={"there": "eager"}),
}


class Traffic:
    """What a thread does with a device: it sends a message, begins to wait, and has waited."""

    def __init__(self, device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        stream = tensors.streams[device.index]
        send, wait = stream.link.send, stream.wait

        def sent(*args: Any) -> None:
            self.events.append("sent")
            send(*args)

        def waited(*args: Any) -> None:
            self.events.append("wait")
            wait(*args)
            self.events.append("over")

        monkeypatch.setattr(stream.link, "send", sent)
        monkeypatch.setattr(stream, "wait", waited)

    def of(self, action: Callable[[], object]) -> list[str]:
        self.events.clear()
        action()
        return list(self.events)


@pytest.fixture
def traffic(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    monkeypatch.setattr("skyfab.device.stream.DeviceStream.try_flush", lambda self: False)  # no other thread sends
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0, raising=False)
    yield Traffic(device, monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
def test_a_value_in_every_step_is_one_round_trip(device: Any, traffic: Traffic, way: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    optimizer, called = torch.optim.AdamW(model.parameters(), fused=True), WAYS[way](model)
    x = torch.ones(3, 8, device=device)

    def step() -> None:
        optimizer.zero_grad()
        loss = called(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        loss.item()

    for _ in range(2):
        step()
    for _ in range(STEPS):
        *before, sent, wait, over = traffic.of(step)
        assert (sent, wait, over) == ("sent", "wait", "over")
        assert set(before) <= {"sent"}  # an idle host begins with a graph, or the first operators


@pytest.mark.filterwarnings("ignore")
def test_a_token_is_one_round_trip(device: Any, traffic: Traffic) -> None:
    table, layer = nn.Embedding(20, 8).to(device), nn.Linear(8, 20).to(device)
    token = torch.tensor([1], device=device)

    def following() -> None:
        nonlocal token
        token = layer(table(token)).argmax(1)
        int(token)

    with torch.no_grad():
        following()
        for _ in range(STEPS):
            assert traffic.of(following) == ["sent", "wait", "over"]


def test_several_values_of_one_step(device: Any, traffic: Traffic) -> None:
    """One round trip each; read together, they are one."""
    x = torch.arange(4.0, device=device)
    traffic.of(lambda: [x.sum().item(), x.max().item()])
    assert traffic.of(lambda: [x.sum().item(), x.max().item()]) == ["sent", "wait", "over"] * 2
    traffic.of(lambda: torch.stack([x.sum(), x.max()]).tolist())
    assert traffic.of(lambda: torch.stack([x.sum(), x.max()]).tolist()) == ["sent", "wait", "over"]
