"""Sparse gradients of embeddings, and what optimizers do with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky

torch = pytest.importorskip("torch")
nn = torch.nn

pytestmark = [pytest.mark.lab, pytest.mark.filterwarnings("ignore:Sparse invariant checks")]


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, sparse=True, mode=mode, padding_idx=3)

    def forward(self, ids: Any) -> Any:
        return self.table(ids)


MODELS: dict[str, Callable[[], Any]] = {
    "embedding": lambda: nn.Embedding(10, 4, sparse=True),
    "with padding": lambda: nn.Embedding(10, 4, sparse=True, padding_idx=3),
    "scaled": lambda: nn.Embedding(10, 4, sparse=True, max_norm=1.5),
    "sums": lambda: Bags("sum"),
    "means": lambda: Bags("mean"),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, one by one": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adagrad, one by one": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=False),
}
IDS = torch.tensor([[1, 2, 1, 7], [3, 7, 7, 0]])


def trained(model: Callable[[], Any], optimizer: Callable[[Any], Any], where: Any) -> list[Any]:
    """Losses, weights and gradients of some steps, with a schedule, and with gradients that are added up."""
    torch.manual_seed(0)
    module = model().to(where)
    weights = list(module.parameters())
    update = optimizer(weights)
    schedule = torch.optim.lr_scheduler.StepLR(update, 1, 0.5)
    found = []
    for step in range(4):
        for part in range(1 + step % 2):
            loss = module(((IDS + part + step) % 10).to(where)).pow(2).sum()
            loss.backward()
        assert weights[0].grad.is_sparse
        found += [loss.detach().cpu(), weights[0].grad.to_dense().cpu()]
        update.step()
        update.zero_grad()
        schedule.step()
        found.append(weights[0].detach().cpu().clone())
    return found


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, "SGD, momentum") for model in MODELS), *(("with padding", optimizer) for optimizer in OPTIMIZERS)],
)
def test_training(device: Any, model: str, optimizer: str) -> None:
    found, expected = (trained(MODELS[model], OPTIMIZERS[optimizer], where) for where in (device, "cpu"))
    torch.testing.assert_close(found, expected)


def test_a_step_of_sgd_waits_for_nothing(device: Any, syncs: Callable[[], int]) -> None:
    table = nn.Embedding(10, 4, sparse=True).to(device)
    optimizer, ids = torch.optim.SGD(table.parameters(), lr=0.1), IDS.to(device)
    for _ in range(3):
        before = syncs()
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert syncs() == before


def gradient(where: Any) -> Any:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, sparse=True).to(where)
    (table(IDS.to(where)) ** 2).sum().backward()
    return table.weight.grad


OPERATORS: dict[str, Callable[[Any], Any]] = {
    "coalesce": lambda g: g.coalesce().values(),
    "scaled": lambda g: (g * 2).to_dense(),
    "scaled in place": lambda g: g.mul_(3).to_dense(),
    "added in place": lambda g: g.add_(g.clone()).to_dense(),
    "subtracted": lambda g: (g - g * 0.5).to_dense(),
    "added to a dense one": lambda g: torch.ones(10, 4, device=g.device) + g,
    "zero": lambda g: g.clone().zero_().to_dense(),
    "norm": lambda g: g.coalesce().norm(),
    "float64": lambda g: g.double().to_dense(),
    "here": lambda g: g.cpu().to_dense(),
    "shape": lambda g: torch.tensor([*g.shape, g.sparse_dim(), g.dense_dim()]),
    "mask": lambda g: torch.ones(10, 4, device=g.device).sparse_mask(g.coalesce()).to_dense(),
    "rows": lambda g: g.index_select(0, torch.tensor([1, 7], device=g.device)).to_dense(),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operators_of_sparse_gradients(device: Any, name: str) -> None:
    found, expected = (OPERATORS[name](gradient(where)) for where in (device, "cpu"))
    torch.testing.assert_close(found.cpu(), expected)


def test_the_memory_of_gradients_is_freed(device: Any) -> None:
    table = nn.Embedding(10, 4, sparse=True).to(device)
    ids, optimizer = IDS.to(device), torch.optim.SparseAdam(table.parameters())
    counts = []
    for _ in range(4):
        table(ids).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sky.synchronize()
        counts.append(sky.memory(device)["tensors"])
    assert len(set(counts[1:])) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_tensors_of_programs(device: Any) -> None:
    made = torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, 2.0], (3, 2), device=device)
    assert (made.device, made.to_dense().tolist()) == (device, [[0, 1], [0, 0], [2, 0]])
    assert torch.equal(torch.eye(3).to_sparse().to(device).to_dense().cpu(), torch.eye(3))
    assert torch.sparse.mm(made, torch.ones(2, 1, device=device)).tolist() == [[1], [0], [2]]
    assert torch.empty(3, layout=torch.sparse_coo, device=device).to_dense().tolist() == [0, 0, 0]
    assert torch.zeros(3, 2, device=device).add_(made, alpha=2).tolist() == [[0, 2], [0, 0], [4, 0]]


def test_sparse_arguments_of_functions_are_refused(device: Any) -> None:
    with pytest.raises(sky.SkyfabError, match="sparse"):
        sky.run_on(device, lambda g: g.to_dense(), gradient(device))
    assert "nnz=8" in repr(gradient(device))
