"""Derivatives of derivatives: those of the CPU, or an error, and never without one of their terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.lab

Program = Callable[..., Any]


def drawn(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64)


def recurrent(kind: str, **options: Any) -> tuple[Program, list[Any]]:
    torch.manual_seed(1)
    module = getattr(nn, kind)(3, 4, dtype=torch.float64, **options)
    names = [name for name, _ in module.named_parameters()]

    def program(x: Any, *weights: Any) -> Any:
        there = getattr(nn, kind)(3, 4, dtype=torch.float64, device="meta", **options)
        return torch.func.functional_call(there, dict(zip(names, weights, strict=True)), (x,))[0]

    return program, [drawn(2, 3) if "Cell" in kind else drawn(5, 2, 3), *(p.detach() for p in module.parameters())]


def packed(x: Any, weight: Any, hidden: Any) -> Any:
    cell = nn.GRU(3, 4, bias=False, dtype=torch.float64, device="meta")
    weights = {"weight_ih_l0": weight, "weight_hh_l0": hidden}
    sequence = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    return torch.func.functional_call(cell, weights, (sequence,))[0].data


def attention(**options: Any) -> tuple[Program, list[Any]]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), [drawn(2, 4, 3) for _ in range(3)]


CASES: dict[str, Callable[[], tuple[Program, list[Any]]]] = {
    "causal attention": lambda: attention(is_causal=True, scale=0.3),
    "attention with a mask": lambda: (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
        [*(drawn(2, 4, 3) for _ in range(3)), drawn(4, 4)],
    ),
    "GRU, both ways": lambda: recurrent("GRU", bidirectional=True, num_layers=2),
    "RNN, relu": lambda: recurrent("RNN", nonlinearity="relu"),
    "LSTM with projections": lambda: recurrent("LSTM", proj_size=2),
    "packed GRU": lambda: (packed, [drawn(5, 2, 3), drawn(12, 3), drawn(12, 4)]),
    "LSTMCell": lambda: recurrent("LSTMCell"),
    "linear": lambda: (F.linear, [drawn(2, 3), drawn(4, 3), drawn(4)]),
    "layer_norm": lambda: (lambda x, w, b: F.layer_norm(x, (3,), w, b), [drawn(2, 3), drawn(3), drawn(3)]),
    "rms_norm": lambda: (lambda x, w: F.rms_norm(x, (3,), w), [drawn(2, 3), drawn(3)]),
    "group_norm": lambda: (lambda x, w, b: F.group_norm(x, 2, w, b), [drawn(2, 4, 3), drawn(4), drawn(4)]),
    "batch_norm": lambda: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        [drawn(5, 3), drawn(3), drawn(3)],
    ),
    "conv2d": lambda: (F.conv2d, [drawn(1, 2, 5, 5), drawn(3, 2, 3, 3), drawn(3)]),
    "cross_entropy": lambda: (lambda x: F.cross_entropy(x, torch.tensor([0, 2]).to(x.device)), [drawn(2, 3)]),
    "gelu": lambda: (F.gelu, [drawn(2, 3)]),
    "embedding": lambda: (lambda w: F.embedding(torch.tensor([1, 1, 0]).to(w.device), w), [drawn(3, 2)]),
}


TWICE = {"batch_norm"}
"""PyTorch 2.15 has no third derivatives of these."""


def derived(program: Program, values: list[Any], where: Any, times: int = 3) -> list[Any]:
    """First, second and third derivatives, weighted so that no term is zero."""
    inputs = [value.to(where).requires_grad_() for value in values]
    result = program(*inputs)
    weight = torch.linspace(0.5, 2, result.numel(), dtype=result.dtype).view(result.shape).to(where).requires_grad_()
    found = []
    for _ in range(times):
        gradients = torch.autograd.grad((result * weight).sum(), [*inputs, weight], create_graph=True)
        found += gradients
        result = torch.cat([(gradient**2).flatten() for gradient in gradients])
        weight = torch.linspace(1, 2, result.numel(), dtype=result.dtype).to(where).requires_grad_()
    return [value.detach().cpu() for value in found]


def outcome(case: str, where: Any) -> Any:
    torch.manual_seed(0)
    program, values = CASES[case]()
    try:
        return derived(program, values, where, times=2 if case in TWICE else 3)
    except (RuntimeError, sky.DeviceError) as error:
        assert "is not implemented" in str(error)  # noqa: PT017
        return "not implemented"


@pytest.mark.parametrize("case", CASES)
def test_derivatives_of_derivatives(device: Any, case: str) -> None:
    """Where PyTorch has none on the CPU, there is none on the device."""
    expected, found = outcome(case, "cpu"), outcome(case, device)
    if expected == "not implemented":
        assert found == expected
        assert torch.ones(2, device=device).tolist() == [1, 1]
    else:
        torch.testing.assert_close(found, expected)


def test_a_derivative_that_pytorch_does_not_have(device: Any) -> None:
    """A fast kernel of attention, whose gradient has no derivative: an error, also where another term has one."""
    x = torch.randn(1, 2, 4, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x, create_graph=True)
    penalty = gradient.pow(2).sum() + x.sum()
    with pytest.raises((RuntimeError, sky.DeviceError), match="not implemented"):
        torch.autograd.grad(penalty, x, allow_unused=True)[0].cpu()


def test_dropout_has_one_mask(device: Any) -> None:
    """The derivatives of a gradient have the mask of the forward."""
    lstm = nn.GRU(3, 3, num_layers=2, dropout=0.5).to(device)
    results = []
    for seed in (1, 1):
        torch.manual_seed(seed)
        x = torch.linspace(0, 1, 12, device=device).view(2, 2, 3).requires_grad_()
        (first,) = torch.autograd.grad(lstm(x)[0].pow(2).sum(), x, create_graph=True)
        torch.rand(9, device=device)
        results.append(torch.autograd.grad(first.sum(), x)[0].cpu())
    assert torch.equal(*results)


def test_modules_on_the_host(device: Any) -> None:
    values = [drawn(2, 3)]
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3)).double()
    expected = derived(module, values, "cpu")
    torch.testing.assert_close(derived(sky.remote(module.to(device)), values, device), expected)


def test_linear_layers_with_autocast(device: Any) -> None:
    """The second derivative of a penalty is that of operators one by one."""
    results = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4).to(where), torch.randn(2, 4).to(where).requires_grad_()
        with torch.autocast(torch.device(where).type, torch.bfloat16):
            out = layer(x).float().pow(2).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        (gradient.pow(2).sum() + x.sum()).backward()
        results.append([x.grad.cpu(), layer.weight.grad.cpu(), layer.bias.grad.cpu()])
    torch.testing.assert_close(results[1], results[0], rtol=0.05, atol=0.1)


def test_gradients_share_no_memory(device: Any) -> None:
    """An addition passes one gradient on to both: a change of one of them does not change the other."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            return x + self.by

    module = Shift().to(device)
    x = torch.ones(3, device=device, requires_grad=True)
    out = sky.remote(module)(x)
    out.retain_grad()
    out.pow(2).sum().backward()
    x.grad.mul_(3)
    module.by.grad.mul_(5)
    assert (out.grad.tolist(), x.grad.tolist(), module.by.grad.tolist()) == ([4] * 3, [12] * 3, [20] * 3)
