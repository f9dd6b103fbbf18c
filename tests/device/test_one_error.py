"""A wrong line in a loop of training is one error, and the loop continues as if that step had not been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.torch]

STEPS = 5


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def rmsprop(parameters: Any) -> Any:
    return torch.optim.RMSprop(parameters, lr=1e-2, foreach=False)


def lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=1e-2, max_iter=2)


class Training:
    """A loop whose tokens are out of range in one step."""

    def __init__(self, device: Any, optimizer: Callable[[Any], Any] = adamw, *, scaled: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(24, 10)).to(device)
        self.optimizer = optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=scaled)
        self.tokens = torch.randint(10, (STEPS, 4, 3))
        self.targets = torch.randint(10, (4,)).to(device)
        self.device = device

    def step(self, number: int, *, is_wrong: bool = False, zero: str = "before") -> None:
        tokens = (self.tokens[number] + 50 * is_wrong).to(self.device)

        def loss() -> Any:
            found = nn.functional.cross_entropy(self.model(tokens), self.targets)
            if zero == "before":
                self.optimizer.zero_grad()
            self.scaler.scale(found).backward()
            return found

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(loss)
        else:
            found = loss()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if zero == "after":
                self.optimizer.zero_grad()
            found.item()

    def weights(self) -> list[Any]:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


def errors(training: Training, wrong: int, **options: Any) -> int:
    """How many errors the loop raises that is wrong in a step."""
    count = 0
    for number in range(STEPS):
        try:
            training.step(number, is_wrong=number == wrong, **options)
        except IndexError:
            count += 1
    sky.synchronize()
    return count


@pytest.mark.parametrize(
    ("optimizer", "zero"), [(adamw, "before"), (momentum, "after"), (rmsprop, "before"), (lbfgs, "after")]
)
def test_the_first_step_is_wrong(device: Any, optimizer: Callable[[Any], Any], zero: str) -> None:
    """Optimizers make their state in it, and the first gradients are made."""
    there, here = Training(device, optimizer), Training("cpu", optimizer)
    assert errors(there, 0, zero=zero) == errors(here, 0, zero=zero) == 1
    torch.testing.assert_close(there.weights(), here.weights())


def test_with_scaled_gradients(device: Any) -> None:
    there, here = Training(device, momentum, scaled=True), Training("cpu", momentum, scaled=True)
    assert errors(there, 2) == errors(here, 2) == 1
    torch.testing.assert_close(there.weights(), here.weights())
    assert there.scaler.get_scale() == here.scaler.get_scale()


def test_sparse_gradients(device: Any) -> None:
    embedding = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    count = 0
    for number in (50, 1, 2):
        try:
            embedding(torch.tensor([number]).to(device)).sum().backward()
            optimizer.step()
            embedding.weight.sum().item()
        except IndexError:
            count += 1
    assert count == 1 and embedding.weight.grad.to_dense().cpu()[1:3].tolist() == [[1.0] * 4] * 2


def test_gradients_that_were_there_stay(device: Any) -> None:
    there, here = Training(device), Training("cpu")
    for training in (there, here):
        training.step(0, zero="never")
        with pytest.raises(IndexError):
            training.step(1, is_wrong=True, zero="never")
    for theirs, mine in zip(there.model.parameters(), here.model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad)
    assert all(len(state) == 3 for state in there.optimizer.state.values())


def test_an_error_in_the_middle_of_a_step(device: Any) -> None:
    """Nothing waits: any line raises it, also one that makes a part of an optimizer's state."""
    training = Training(device)
    tokens = training.tokens[0].to(device)
    count = 0
    for number in range(60):
        try:
            loss = nn.functional.cross_entropy(training.model(tokens + 50 * (number == 0)), training.targets)
            loss.backward()
            training.optimizer.step()
        except IndexError:
            count += 1
    sky.synchronize()
    assert count == 1 and loss.item() < 1.5
