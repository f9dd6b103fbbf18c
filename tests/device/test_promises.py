"""Promises of docs/remote_device.md about all operators: what waits, seeds, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = pytest.mark.lab

WAITS: dict[str, Callable[[Any], Any]] = {
    "item": lambda a: a[0, 0].item(),
    "if": lambda a: bool((a > 0).any()),
    "tolist": lambda a: a.tolist(),
    "cpu": lambda a: a.cpu(),
    "print": str,
    "a mask as an index": lambda a: a[a > 0],
    "nonzero": lambda a: a.nonzero(),
    "equal": lambda a: torch.equal(a, a),
    "synchronize": lambda a: sky.synchronize(),
    "memory": lambda a: sky.memory(a.device),
    "run_on": lambda a: sky.run_on(a.device, len, a),
}
WAITS_NOT: dict[str, Callable[[Any], Any]] = {
    "shape": lambda a: (a.shape, a.dtype, len(a)),
    "arithmetic": lambda a: a @ a + 1,
    "a view": lambda a: a.t()[1:].unsqueeze(0),
    "masked_fill": lambda a: a.masked_fill(a > 5, 0),
    "an index of numbers": lambda a: a[torch.tensor([1, 0])],
    "upload": lambda a: torch.ones(300, 300).to(a.device),
    "fetch": sky.fetch,
    "deepcopy": copy.deepcopy,
    "load_state_dict": lambda a: nn.Linear(2, 2).to(a.device).load_state_dict(nn.Linear(2, 2).state_dict()),
    "seed": lambda a: torch.manual_seed(1),
    "random numbers": lambda a: torch.rand_like(a),
    "multinomial": lambda a: torch.multinomial(torch.ones_like(a), 1),
}


def waits_of(device: Any, program: Callable[[Any], Any]) -> int:
    a = torch.ones(4, 4, device=device)
    with sky.device.profile() as found:
        program(a)
    sky.synchronize()
    return found.waits


@pytest.mark.parametrize("name", WAITS)
def test_what_waits(remote_pool: sky.Compute, device: Any, name: str) -> None:
    devices = len(remote_pool.hosts) if name == "synchronize" else 1
    assert waits_of(device, WAITS[name]) == devices


@pytest.mark.parametrize("name", WAITS_NOT)
def test_what_does_not_wait(device: Any, name: str) -> None:
    assert waits_of(device, WAITS_NOT[name]) == 0


def test_an_error_that_was_caught_leaves_nothing_of_where_it_was_raised(device: Any) -> None:
    """PyTorch disables its function transforms in the frames that print a tensor: nothing may keep these."""
    for _ in range(2):
        lost = torch.arange(3, device=device)[torch.tensor([7], device=device)]
        with contextlib.suppress(sky.DeviceError):
            print(lost)
            raise AssertionError("no error")
        assert torch.func.grad(lambda x: (x**3).sum())(torch.tensor([2.0])).tolist() == [12]


@pytest.mark.slow
def test_a_seed_from_before_the_device_counts() -> None:
    torch.manual_seed(11)
    expected = torch.randn(3)
    torch.manual_seed(11)
    with sky.Compute("local", ui="none") as compute:
        assert torch.randn(3, device=compute.device("cpu")).tolist() == expected.tolist()


def test_a_generator_that_is_dropped_ends_there(device: Any) -> None:
    def numbers() -> Iterator[int]:
        os.environ.pop("NUMBERS_ENDED", None)
        try:
            yield from range(10**9)
        finally:
            os.environ["NUMBERS_ENDED"] = "1"

    found = sky.run_on(device, numbers)
    assert next(found) == 0
    del found
    until(lambda: sky.run_on(device, os.getenv, "NUMBERS_ENDED") == "1")


REFUSED: dict[str, Callable[[Any], Any]] = {
    "sparse CSR, to": lambda device: torch.eye(3).to_sparse_csr().to(device),
    "sparse, like": lambda device: torch.zeros_like(torch.ones(3, device=device), layout=torch.sparse_coo),
    "sparse, there": lambda device: torch.eye(3, device=device).to_sparse(),
    "nested": lambda device: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device),
    "quantized, to": lambda device: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8).to(device),
    "quantized, there": lambda device: torch.quantize_per_tensor(torch.ones(3, device=device), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", REFUSED)
def test_other_layouts_are_refused(device: Any, way: str) -> None:
    """PyTorch refuses to make one, or to read it; the device can still be used."""
    with pytest.raises((NotImplementedError, RuntimeError, sky.DeviceError)):
        str(REFUSED[way](device))
    assert torch.ones(2, device=device).tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_jagged_tensors(device: Any) -> None:
    """PyTorch composes them of dense ones."""
    made = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [part.tolist() for part in (made.to(device) * 2).unbind()] == [[2, 2], [2, 2, 2]]
