"""How many instructions operators and optimizers need, and when they are sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky
from skyfab.device.stream import DeviceStream

torch = pytest.importorskip("torch")
nn = torch.nn
F = torch.nn.functional

OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(4, 8), (6, 8), (6,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [(4, 8), (8,), (8,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [(2, 4, 8), (8,)]),
    "rms_norm of two dimensions": (lambda x, w: F.rms_norm(x, (4, 8), w, 1e-3), [(2, 4, 8), (4, 8)]),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(4, 8), (8,), (8,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(4, 8, 3), (8,), (8,)]),
    "attention": (F.scaled_dot_product_attention, [(2, 3, 4, 8)] * 3),
    "silu": (F.silu, [(4, 8)]),
    "mish": (F.mish, [(4, 8)]),
    "softmax": (lambda x: x.softmax(-1), [(4, 8)]),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_one_instruction_each_way(device: Any, name: str) -> None:
    function, shapes = OPERATORS[name]
    given = [torch.randn(shape) for shape in shapes]
    results = []
    for where in ("cpu", device, device):  # the second time, the host has the plans
        inputs = [tensor.to(where).requires_grad_() for tensor in given]
        with sky.device.profile() as forward:
            result = function(*inputs)
        grad = torch.ones(result.shape).to(where)
        with sky.device.profile() as backward:
            grads = torch.autograd.grad(result, inputs, grad)
        results.append([result, *grads])
    assert (forward.operations, backward.operations) == (1, 1)
    for here, there in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own, in its jvp
@pytest.mark.parametrize("function", [lambda x: F.rms_norm(x, (8,)), F.silu, F.mish])
def test_their_other_derivatives(device: Any, function: Callable[..., Any]) -> None:
    def second(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    x = torch.randn(3, 8, dtype=torch.float64)
    there = x.to(device)
    torch.testing.assert_close(second(there.clone().requires_grad_()).cpu(), second(x.clone().requires_grad_()))
    torch.testing.assert_close(
        torch.func.jvp(function, (there,), (there,))[1].cpu(), torch.func.jvp(function, (x,), (x,))[1]
    )
    each = torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))
    torch.testing.assert_close(each(there).cpu(), each(x))


@pytest.mark.parametrize(
    ("optimizer", "options", "most"),
    [
        (torch.optim.AdamW, {"fused": True}, 2),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 8),
    ],
)
def test_a_step_of_an_optimizer_does_not_depend_on_the_number_of_parameters(
    device: Any, optimizer: Any, options: dict[str, Any], most: int
) -> None:
    """Those that are fused count the steps with another instruction."""
    for layers in (1, 7):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(device)
        chosen = optimizer(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            model(torch.ones(2, 4, device=device)).sum().backward()
            with sky.device.profile() as found:
                chosen.step()
        assert found.operations <= most


def test_a_host_with_nothing_to_do_is_sent_a_module_immediately(device: Any, monkeypatch: Any) -> None:
    module = sky.remote(nn.Linear(3, 3).to(device))
    x = torch.ones(2, 3, device=device)
    module(x)
    sky.synchronize()
    me, send = threading.get_ident(), DeviceStream.try_flush
    monkeypatch.setattr(DeviceStream, "try_flush", lambda stream: threading.get_ident() == me and send(stream))
    with sky.device.profile() as found:
        module(x)
        assert found.batches == 1
        x + 1
        assert found.batches == 1
    assert found.batches == 2


def test_values_that_are_read_in_every_step_are_those_of_each(device: Any) -> None:
    total = torch.zeros((), device=device)
    for step in range(40):
        for _ in range(4 * step):
            total = total + 1
        assert total.item() == 2 * step * (step + 1)
