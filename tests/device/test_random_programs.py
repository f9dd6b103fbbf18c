"""Random programs of views and changes in place: a remote device does what the CPU here does, without waiting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skyfab as sky

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MOST = 8
"""Tensors of a program. A new one then takes the place of another."""
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.int32, torch.uint8)
SCALARS = (0, 1, True, False, 1.0, 2.5, -3, -0.0, math.nan, math.inf, 1j)
FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last)

Step = tuple[str, int, int, int, int, int]
"""The name of an operation, two tensors, and numbers from which it makes its arguments."""


def dim(t: Any, n: int) -> int:
    return n % max(t.dim(), 1)


def scalar(n: int) -> Any:
    return SCALARS[n % len(SCALARS)]


def index(t: Any, along: int, n: int) -> Any:
    """Places along a dimension, some of them twice."""
    size = t.shape[along]
    return torch.tensor([n % size, (n * 5 + 1) % size, n % size], device=t.device)


def mask(t: Any, n: int) -> Any:
    return (torch.arange(t.numel(), device=t.device).view(t.shape) * (n + 1)) % 3 == 0


def like(t: Any, u: Any) -> Any:
    """A value that can be written into `t`: `u` if its shape allows it, else one element of it."""
    u = u.resolve_neg() if t.dtype is torch.bool else u  # the CPU refuses it when it has done half of it
    return u if u.shape == t.shape[t.dim() - u.dim() :] else u.flatten()[0]


def small(t: Any) -> Any:
    """Its values in a range that all dtypes have: what others become is not defined."""
    return t if t.dtype is torch.bool else (t.real if t.is_complex() else t).nan_to_num(7, 7, 7).clamp(0, 100)


def set_data(t: Any, u: Any) -> None:
    if t.is_neg() != u.is_neg() or t.is_conj() != u.is_conj():
        raise TypeError("a remote device refuses it")
    t.data = u.data


VIEWS: dict[str, Callable[..., Any]] = {
    "slice": lambda t, u, a, b, c: t[(slice(None),) * dim(t, a) + (slice(b % 3, None, c % 3 + 1),)],
    "select": lambda t, u, a, b, c: t.select(dim(t, a), b % t.shape[dim(t, a)]),
    "narrow": lambda t, u, a, b, c: t.narrow(dim(t, a), b % 2, max(t.shape[dim(t, a)] - 1 - c % 2, 0)),
    "transpose": lambda t, u, a, b, c: t.transpose(dim(t, a), dim(t, b)),
    "view": lambda t, u, a, b, c: t.view(-1) if c % 2 else t.view(t.shape[0], -1),
    "reshape": lambda t, u, a, b, c: t.reshape(-1) if c % 2 else t.reshape(-1, t.shape[0]),
    "expand": lambda t, u, a, b, c: t.unsqueeze(a % (t.dim() + 1)).expand(
        *t.shape[: a % (t.dim() + 1)], b % 3, *t.shape[a % (t.dim() + 1) :]
    ),
    "unfold": lambda t, u, a, b, c: t.unfold(dim(t, a), b % 3 + 1, c % 2 + 1),
    "as_strided": lambda t, u, a, b, c: t.as_strided((a % 4, b % 3), (c % 4, a % 3), b % 5),
    "diagonal": lambda t, u, a, b, c: t.diagonal(a % 3 - 1, 0, 1),
    "squeeze": lambda t, u, a, b, c: t.unsqueeze(0).squeeze(),
    "split": lambda t, u, a, b, c: t.split(b % 3 + 1, dim(t, a))[-1],
    "detach": lambda t, u, a, b, c: t.detach(),
    "real": lambda t, u, a, b, c: t.real if c % 2 else torch.view_as_real(t.resolve_conj()),
}
LAZY: dict[str, Callable[..., Any]] = {
    "conj": lambda t, u, a, b, c: t.conj(),
    "imag": lambda t, u, a, b, c: t.imag,
    "neg_view": lambda t, u, a, b, c: t._neg_view() if t.dtype is not torch.bool else t.view(-1),
    "as dtype": lambda t, u, a, b, c: t.view(DTYPES[a % len(DTYPES)]),
}
"""A conjugated or negated view is one when it is read. Another dtype is that of the same bytes."""
CHANGED_VIEWS: dict[str, Callable[..., Any]] = {
    "data": lambda t, u, a, b, c: set_data(t, u),
    "set_": lambda t, u, a, b, c: t.set_(u),
    "shrink": lambda t, u, a, b, c: t.resize_(t.numel() // (a % 3 + 1)),
    "t_": lambda t, u, a, b, c: t.t_(),
    "unsqueeze_": lambda t, u, a, b, c: t.unsqueeze_(a % (t.dim() + 1)),
}
IN_PLACE: dict[str, Callable[..., Any]] = {
    "copy_": lambda t, u, a, b, c: t.copy_(like(t, u)),
    "add_": lambda t, u, a, b, c: t.add_(like(t, u) if a % 2 else scalar(b), alpha=c % 2 + 1),
    "mul_": lambda t, u, a, b, c: t.mul_(like(t, u) if a % 2 else scalar(b)),
    "fill_": lambda t, u, a, b, c: t.fill_(scalar(a)),
    "zero_": lambda t, u, a, b, c: t.zero_(),
    "masked_fill_": lambda t, u, a, b, c: t.masked_fill_(mask(t, a), scalar(b)),
    "set slice": lambda t, u, a, b, c: t.__setitem__(slice(a % 3, None, b % 2 + 1), scalar(c)),
    "set mask": lambda t, u, a, b, c: t.__setitem__(mask(t, a), scalar(b)),
    "set index": lambda t, u, a, b, c: t.__setitem__(index(t, 0, a), u.flatten()[0]),
    "index_put_": lambda t, u, a, b, c: t.index_put_(
        (index(t, 0, a),), torch.ones((), dtype=t.dtype, device=t.device), accumulate=bool(b % 2)
    ),
    "index_fill_": lambda t, u, a, b, c: t.index_fill_(dim(t, a), index(t, dim(t, a), b), scalar(c)),
    "cumsum_": lambda t, u, a, b, c: t.cumsum_(dim(t, a)),
    "out=": lambda t, u, a, b, c: torch.add(like(t, u), scalar(a), out=t if t.numel() else t.clone()),
    "swap": lambda t, u, a, b, c: t.copy_(t.flip(dim(t, a))),
}
NEW: dict[str, Callable[..., Any]] = {
    "add": lambda t, u, a, b, c: t + (like(t, u) if a % 2 else scalar(b)),
    "mul": lambda t, u, a, b, c: (like(t, u) if a % 2 else scalar(b)) * t,
    "compare": lambda t, u, a, b, c: t == like(t, u),
    "clone": lambda t, u, a, b, c: t.clone(memory_format=FORMATS[a % 2]),
    "channels": lambda t, u, a, b, c: t.expand(1, 2, *t.shape).clone(memory_format=FORMATS[2]),
    "contiguous": lambda t, u, a, b, c: t.contiguous(),
    "cat": lambda t, u, a, b, c: torch.cat([t, u, t], dim(t, a)) if b % 2 else torch.stack([t, t], dim(t, a)),
    "where": lambda t, u, a, b, c: torch.where(mask(t, a), t, like(t, u) if b % 2 else scalar(c)),
    "index": lambda t, u, a, b, c: t[(slice(None),) * dim(t, a) + (index(t, dim(t, a), b),)],
    "index by mask": lambda t, u, a, b, c: t[mask(t, a)],
    "gather": lambda t, u, a, b, c: t.take(index(t.view(-1), 0, a)),
    "cumsum": lambda t, u, a, b, c: t.cumsum(dim(t, a)),
    "sort": lambda t, u, a, b, c: t.contiguous().sort(dim=dim(t, a), stable=True, descending=bool(b % 2))[c % 2],
    "sum": lambda t, u, a, b, c: t.sum(dim(t, a), keepdim=bool(b % 2)) if t.dim() and c % 2 else t.sum(),
    "matmul": lambda t, u, a, b, c: t @ t.mT if a % 2 else t.mH @ t,
    "flip": lambda t, u, a, b, c: t.contiguous().flip(dim(t, a)).roll(b % 3, dim(t, a)),
    "pad": lambda t, u, a, b, c: torch.nn.functional.pad(t, (a % 3, b % 3)),
}
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "to": lambda t, u, a, b, c: small(t).to(DTYPES[a % len(DTYPES)]),
    "to copy": lambda t, u, a, b, c: small(t).to(DTYPES[a % len(DTYPES)], copy=True, memory_format=FORMATS[b % 2]),
    "grow": lambda t, u, a, b, c: t.clone().resize_(a % 4 + 2, b % 5 + 3).fill_(scalar(c)),
    "like": lambda t, u, a, b, c: torch.full_like(t.contiguous(), scalar(a)),
    "from here": lambda t, u, a, b, c: t.new_tensor([[0, 1], [2, 3]]),
}
ALL = {**VIEWS, **LAZY, **CHANGED_VIEWS, **IN_PLACE, **NEW, **CONVERSIONS}
DIFFERENTIABLE = {name: ALL[name] for name in (*VIEWS, *IN_PLACE, *NEW) if name != "out="}


def programs(operations: dict[str, Any]) -> st.SearchStrategy[list[Step]]:
    number = st.integers(0, 11)
    return st.lists(
        st.tuples(st.sampled_from(list(operations)), number, number, number, number, number), min_size=3, max_size=16
    )


def execute(step: Step, tensors: list[Any]) -> None:
    name, at, other, a, b, c = step
    t, u = tensors[at % len(tensors)], tensors[other % len(tensors)]
    made = ALL[name](t, u, a, b, c)
    if name in IN_PLACE or name in CHANGED_VIEWS:
        return
    if made.numel() > 200:
        raise ValueError("too large")
    if len(tensors) < MOST:
        tensors.append(made)
    else:
        tensors[(a + b + c) % MOST] = made


def possible(steps: Sequence[Step], tensors: list[Any]) -> list[Step]:
    """Executes a program on this machine; returns the steps that PyTorch does not refuse there."""
    done = []
    for step in steps:
        try:
            execute(step, tensors)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
            continue
        done.append(step)
    return done


def start(device: Any) -> list[Any]:
    return [
        torch.arange(24.0).view(4, 6).to(device),
        torch.arange(12).view(3, 4).to(device)[:, 1:],
        torch.tensor([[1 + 2j, 3 - 1j, 0.5], [2, 1j, -1], [1, 2, 3j]]).to(device),
        torch.tensor([True, False, True]).to(device),
        torch.tensor(3.0).to(device),
    ]


def strides(t: Any) -> list[int]:
    """Those that mean something."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1 and t.numel()]


def agree(theirs: Sequence[Any], mine: Sequence[Any], tolerance: float = 0) -> None:
    assert len(theirs) == len(mine)
    for there, here in zip(theirs, mine, strict=True):
        assert (there is None) == (here is None)
        if here is not None:
            assert (there.dtype, there.shape, strides(there)) == (here.dtype, here.shape, strides(here))
            torch.testing.assert_close(
                there.detach().cpu(), here.detach(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


def check(device: Any, steps: Sequence[Step]) -> None:
    here, there = start("cpu"), start(device)
    for step in possible(steps, here):
        execute(step, there)
    agree(there, here)


def start_differentiable(device: Any) -> list[Any]:
    """Tensors that require gradients."""
    values = torch.arange(24.0, dtype=torch.float64)
    return [part.to(device).requires_grad_() for part in (values.view(4, 6) / 7, values[:9].view(3, 3), values[5])]


def gradients(tensors: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """The gradients of a sum of all tensors; none if PyTorch refuses, as after a change of what it needs."""
    try:
        results = [t.real if t.is_complex() else t for t in tensors if t.requires_grad]
        total = sum((at + 1) * (t * t).sum() for at, t in enumerate(results))
        found = torch.autograd.grad(total, inputs, allow_unused=True) if results else ()
        torch.sky.synchronize()  # a host refuses later
        return found
    except (RuntimeError, sky.DeviceError):
        return ()


def check_gradients(device: Any, steps: Sequence[Step]) -> None:
    mine, theirs = start_differentiable("cpu"), start_differentiable(device)
    here, there = [t * 1 for t in mine], [t * 1 for t in theirs]
    for step in possible(steps, here):
        execute(step, there)
    agree(there, here)
    agree(gradients(there, theirs), gradients(here, mine), 1e-9)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("operations", "checked"), [(ALL, check), (DIFFERENTIABLE, check_gradients)], ids=["values", "gradients"]
)
def test_random_programs(
    device: Any, operations: dict[str, Any], checked: Callable[[Any, Sequence[Step]], None], count: int
) -> None:
    @settings(deadline=None, max_examples=count, suppress_health_check=list(HealthCheck))
    @given(programs(operations))
    def run(steps: list[Step]) -> None:
        checked(device, steps)

    run()
