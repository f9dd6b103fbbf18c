"""Tensors that share memory on a host share it for the program too: results that stay, and what is saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.slow]


def several() -> dict[str, Any]:
    base = torch.arange(6.0)
    alone = torch.arange(8.0)[3:]
    numbers = torch.zeros(5)
    return {
        "base": base,
        "offset": base[2:],
        "again": base,
        "column": base.view(2, 3)[:, 1],
        "expanded": base[1].expand(3),
        "alone": alone,
        "halves": [numbers[:2], numbers[3:]],
        "real": (pair := torch.zeros(2, dtype=torch.complex64)).real,
        "complex": pair,
        "empty": base[6:],
    }


def shared(found: dict[str, Any]) -> None:
    """Checks what `several` returns."""
    here = several()
    flat = torch.utils._pytree.tree_leaves
    for mine, theirs in zip(flat(here), flat(found), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        assert torch.equal(mine, theirs.cpu())
    assert found["alone"].tolist() == [3, 4, 5, 6, 7]
    for names in (("base", "offset", "again", "column", "expanded"), ("real", "complex")):
        assert len({found[name].untyped_storage().data_ptr() for name in names}) == 1
    found["offset"].add_(10)
    assert found["base"].tolist() == found["again"].tolist() == [0, 1, 12, 13, 14, 15]
    assert found["column"].tolist() == [1, 14]
    found["base"][1] = 7
    assert found["expanded"].tolist() == [7, 7, 7]
    found["halves"][1].fill_(3)
    assert found["halves"][0].tolist() == [0, 0]
    found["real"].fill_(2)
    assert found["complex"].tolist() == [2, 2]
    assert found["complex"].untyped_storage().data_ptr() != found["base"].untyped_storage().data_ptr()


def test_results_of_a_remote_function(device: Any) -> None:
    before = sky.memory(device)["tensors"]
    found = sky.run_on(device, several)
    shared(found)
    del found
    assert sky.memory(device)["tensors"] == before


def test_results_of_a_call(remote_pool: sky.Compute, device: Any) -> None:
    shared(remote_pool.submit(sky.function(several)(), keep=True).result(170))


def test_changes_of_a_view_are_seen_by_autograd(device: Any) -> None:
    base, part = sky.run_on(device, lambda: (x := torch.ones(3), x[1:]))
    weight = torch.ones(3, device=device, requires_grad=True)
    loss = (weight * base).sum()
    part.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _zero(x: Any, **options: Any) -> None:
    x.zero_()
    if options.get("fails"):
        raise KeyError("after it")


def _failing(device: Any, x: Any) -> None:
    with pytest.raises(sky.DeviceError, match="after it"):
        sky.run_on(device, _zero, x, fails=True)


def _zero_and_yield(x: Any) -> Iterator[int]:
    yield 1
    x.zero_()
    yield 2


def _read(x: Any) -> float:
    return float(x.sum())


class Same(nn.Module):
    """Returns its input, a part of its weight, and a number of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Any, number: Any) -> Any:
        return x, self.weight[0], number


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "function": lambda device, h: sky.run_on(device, _zero, h),
    "function_that_fails": lambda device, h: _failing(device, h),
    "generator": lambda device, h: list(sky.run_on(device, _zero_and_yield, h)),
    "part": lambda device, h: sky.run_on(device, lambda x: {"part": x.view(-1)[1:]}, h)["part"].zero_(),
    "yielded": lambda device, h: next(sky.run_on(device, lambda x: (part for part in x), h)).zero_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_autograd_knows_what_a_remote_function_changes(device: Any, name: str) -> None:
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    hidden = weight * 3
    loss = (hidden * hidden).sum()
    assert sky.run_on(device, _read, hidden) == 12
    loss.backward(retain_graph=True)
    assert weight.grad.tolist() == [[18, 18], [18, 18]]
    CHANGES[name](device, hidden.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert 0 in hidden.flatten().tolist()


def test_autograd_knows_what_a_call_changes(remote_pool: sky.Compute, device: Any) -> None:
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    for fails in (False, True):
        hidden = weight * 3
        loss = (hidden * hidden).sum()
        assert remote_pool.submit(sky.function(_read)(hidden), keep=True).result(170) == 12
        loss.backward(retain_graph=True)
        future = remote_pool.submit(sky.function(_zero)(hidden.detach(), fails=fails), keep=fails)
        assert isinstance(future.exception(170), KeyError) is fails
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    hidden = weight * 3
    loss = (hidden * hidden).sum()
    remote_pool.submit(sky.function(lambda x: x[0])(hidden), keep=True).result(170).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_knows_that_a_module_returns_its_input(device: Any) -> None:
    module = Same().to(device)
    remote, number = sky.remote(module), torch.tensor(2.0)
    weight = torch.ones(2, 2, device=device, requires_grad=True)
    for _ in range(2):
        hidden = weight * 3
        loss = (hidden * hidden).sum()
        same, row, two = remote(hidden, number)
        assert (same.tolist(), row.tolist(), two.item()) == ([[3, 3], [3, 3]], [1, 1], 2)
        assert two.device == device
        grads = torch.autograd.grad(same.sum() + 2 * row.sum(), (weight, module.weight), retain_graph=True)
        assert [grad.tolist() for grad in grads] == [[[3, 3], [3, 3]], [[2, 2], [0, 0]]]
        same.mul_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert hidden.tolist() == [[0, 0], [0, 0]]


def test_tied_weights_that_are_loaded_there(device: Any) -> None:
    def model() -> Any:
        made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        made[1].weight = made[0].weight
        return made

    state = sky.load_on(device, model)
    state["0.weight"].fill_(2)
    assert state["1.weight"].sum().item() == 18


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Any, *, copied: bool = False) -> Any:
        hidden = x * self.weight
        same = hidden.clone() if copied or x.sum() > 100 else hidden
        return hidden, [hidden[1:], hidden[0].expand(2, 3)], {"same": same, "input": x[1:]}


def test_results_of_a_remote_module(device: Any) -> None:
    here, there = Several(), Several().to(device)
    fast, x = sky.remote(there), torch.arange(6.0).view(2, 3)
    for _ in range(3):
        grads = []
        for module, model, inputs in ((here, here, x), (fast, there, x.to(device))):
            hidden, (rest, first), others = module(inputs)
            weights = enumerate((hidden, rest, first, others["same"], others["input"]), 1)
            model.zero_grad()
            sum(tensor.sum() * by for by, tensor in weights).backward()
            grads.append(model.weight.grad.tolist())
            with torch.no_grad():
                rest.add_(100)
            assert hidden.tolist() == others["same"].tolist() == [[0, 1, 2], [103, 104, 105]]
            assert first.stride() == (0, 1)
        assert grads[0] == grads[1]


def test_a_remote_module_whose_results_share_memory_otherwise_later(device: Any) -> None:
    fast = sky.remote(Several().to(device))
    x = torch.ones(2, 3, device=device)
    assert fast(x)[2]["same"].tolist() == fast(x, copied=True)[2]["same"].tolist() == [[1, 1, 1], [1, 1, 1]]
    fast(x)
    with pytest.raises(sky.DeviceError, match="differs from that of its first call"):
        fast(x * 100)[0].tolist()


def test_saving(device: Any, syncs: Callable[[], int]) -> None:
    base = torch.arange(5.0).to(device)
    parameter = nn.Parameter(base[1:])
    before = syncs()
    torch.save({"base": base, "part": base[3:], "row": base.expand(2, 5), "parameter": parameter}, file := io.BytesIO())
    assert syncs() == before + 1
    for where in ("cpu", device):
        found = torch.load(io.BytesIO(file.getvalue()), map_location=where)
        found["part"].fill_(7)
        assert found["base"].tolist() == [0, 1, 2, 7, 7]
        assert found["row"].tolist() == [[0, 1, 2, 7, 7]] * 2
        assert found["parameter"].requires_grad
        assert found["parameter"].tolist() == [1, 2, 7, 7]
    base.add_(1)
    torch.save(base, file := io.BytesIO())
    assert torch.load(io.BytesIO(file.getvalue())).tolist() == [1, 2, 3, 4, 5]
