"""PyTorch programs on a remote device do what they do on this machine's CPU, with the same numbers."""

from __future__ import annotations

import asyncio
import copy
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky
from skyfab.protocol import codec

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.lab

X = torch.randn(32, 20, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 5, (32,), generator=torch.Generator().manual_seed(2))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 5))


def train(device: Any, optimizer: Any, steps: int = 5, **options: Any) -> tuple[list[float], nn.Module, Any]:
    model = mlp().to(device)
    made = optimizer(model.parameters(), lr=1e-2, **options)
    x, y, losses = X.to(device), Y.to(device), []
    for _ in range(steps):
        made.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        made.step()
        losses.append(loss)
    return [loss.item() for loss in losses], model, made


TOLERANCE = 1e-4


def agree(program: Callable[[Any], Any], device: Any) -> None:
    """A program returns the same on both devices: tensors, or tuples and lists of them."""
    results = []
    for where in ("cpu", device):
        torch.manual_seed(0)
        results.append(torch.utils._pytree.tree_leaves(program(where)))
    assert len(results[0]) == len(results[1])
    for mine, theirs in zip(*results, strict=True):
        if isinstance(mine, torch.Tensor):
            assert theirs.device.type == "sky"
            torch.testing.assert_close(theirs.detach().cpu(), mine.detach(), rtol=TOLERANCE, atol=TOLERANCE)
        else:
            assert mine == theirs


def agrees(program: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A test: the program returns the same on both devices."""

    def test(device: Any) -> None:
        agree(program, device)

    test.__name__, test.__doc__ = program.__name__, program.__doc__
    return test


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.Adam, {"capturable": True, "amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_optimizers(device: Any, optimizer: Any, options: Any) -> None:
    here, _, _ = train("cpu", optimizer, **{**options, "capturable": False} if "capturable" in options else options)
    there, _, _ = train(device, optimizer, **options)
    assert there == pytest.approx(here, abs=1e-4)


def test_a_step_waits_for_nothing(device: Any, syncs: Callable[[], int]) -> None:
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = X.to(device), Y.to(device)
    before = syncs()
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert syncs() == before
    loss.item()
    assert syncs() == before + 1


def test_a_module_may_move_while_its_outputs_live(device: Any) -> None:
    """Its parameters keep hooks, attributes and gradients, as between this machine's devices."""
    model, seen = mlp(), list[str]()
    weight = model[0].weight
    weight.mine = "kept"
    weight.register_hook(lambda gradient: seen.append(gradient.device.type))
    reference = weakref.ref(weight)
    alive = []
    for move in (lambda: model.to(device), model.double, model.cpu, lambda: model.to(device), model.float):
        move()
        assert model[0].weight is reference() is weight
        assert weight.mine == "kept"
        assert weight.grad is None or (weight.grad.device, weight.grad.dtype) == (weight.device, weight.dtype)
        alive.append(model(X.to(weight)))
        alive[-1].sum().backward()
    assert seen == [device.type, device.type, "cpu", device.type, device.type]


def test_what_is_fetched_can_be_awaited(device: Any) -> None:
    async def fetched() -> Any:
        return await sky.fetch(X.to(device))

    assert torch.equal(asyncio.run(fetched()), X)


def test_data_loaders(device: Any) -> None:
    data = torch.utils.data.TensorDataset(X, Y)
    model = mlp().to(device)
    seen = 0
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, num_workers=2):
        loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device))
        seen += len(x)
    assert loss.item() > 0
    assert seen == 32


def test_state_dicts(device: Any) -> None:
    model = mlp().to(device)
    second, third = mlp().to(device), mlp()
    nn.init.zeros_(second[0].weight)
    nn.init.zeros_(third[0].weight)
    second.load_state_dict(model.state_dict())
    third.load_state_dict(model.state_dict())
    for other in (second, third):
        assert torch.equal(other[0].weight.cpu(), model[0].weight.cpu())
    assert third[0].weight.device.type == "cpu"
    _, model, optimizer = train(device, torch.optim.AdamW)
    another = torch.optim.AdamW(model.parameters())
    another.load_state_dict(optimizer.state_dict())
    assert another.state[model[0].weight]["exp_avg"].device == device


def test_tied_weights_stay_tied(device: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.to(device)
    assert model[1].weight is model[0].weight
    second = copy.deepcopy(model)
    assert second[1].weight is second[0].weight
    second(torch.ones(2, 4, device=device)).sum().backward()
    assert second[1].weight.grad is not None
    assert model[1].weight.grad is None
    base = torch.zeros(4, 4, device=device)
    views = copy.deepcopy([base, base[1]])
    views[1].fill_(7)
    assert views[0].sum().item() == 28
    assert base.sum().item() == 0


def test_saving_and_loading(device: Any) -> None:
    model = mlp().to(device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["0.weight"].device.type == "cpu"
    assert torch.equal(state["0.weight"], model[0].weight.cpu())
    file.seek(0)
    there = torch.load(file, weights_only=False, map_location=device)
    assert there["0.weight"].device == device
    parameter = nn.Parameter(torch.ones(2, device=device))
    assert pickle.loads(pickle.dumps(parameter)).tolist() == [1, 1]


def test_what_is_sent_to_hosts_has_the_values(device: Any) -> None:
    """As arguments of a call that runs elsewhere: with views of one memory, and as tensors of this machine."""
    base = torch.arange(2000.0, device=device)
    payload = codec.dumps([base, base[3:5]])
    found, view = codec.loads(payload.data, payload.buffers)
    assert found.device.type == "cpu"
    assert torch.equal(found, base.cpu())
    found[3] = 7
    assert view.tolist() == [7, 4]


@agrees
def test_views_and_changes_in_place(where: Any) -> Any:
    t = torch.arange(24.0).view(4, 6).to(where)
    t[1:3, ::2].mul_(10)
    t.t()[0] = 7
    t.view(-1)[5:9].add_(1)
    t[0].zero_()
    t[:, 1].copy_(t[:, 2])
    t.unsqueeze_(0)
    t.squeeze_(0)
    t.transpose_(0, 1)
    t += 1
    return t


@agrees
def test_gradients_through_changed_views(where: Any) -> Any:
    w = torch.ones(4, 4, device=where, requires_grad=True)
    z = w * 2
    z[1].mul_(3)
    z[:, 2] = 5
    (z**2).sum().backward()
    return w.grad


def test_factories(device: Any) -> None:
    with torch.device(device):
        made = [
            torch.ones(2, 3),
            nn.Linear(3, 3).weight,
            torch.empty(2),
            torch.full((2,), 3.0),
            torch.rand(3),
            torch.arange(0, 10, 3),
            torch.linspace(0, 1, 5),
            torch.eye(3),
            torch.tensor([1, 2]),
        ]
    assert {tensor.device for tensor in made} == {device}
    assert made[3].tolist() == [3, 3]
    assert made[5].tolist() == [0, 3, 6, 9]
    assert made[6].tolist() == [0, 0.25, 0.5, 0.75, 1]
    like = torch.ones(2, 3, device=device)
    same = [torch.zeros_like(like), like.new_zeros(3), torch.randn_like(like), like.new_tensor([1.0])]
    same += [torch.empty_like(like), torch.full_like(like, 2)]
    assert {tensor.device for tensor in same} == {device}


@agrees
def test_results_whose_shape_depends_on_values(where: Any) -> Any:
    a = torch.tensor([[0, 1.0], [2, 0]], device=where)
    return a.nonzero(), a[a > 0], a.masked_select(a > 0), torch.unique(a), *torch.where(a > 0)


@agrees
def test_indices(where: Any) -> Any:
    a = torch.arange(12.0).view(3, 4).to(where)
    i = torch.tensor([0, 2])
    a[a > 5] = 0
    b = a[i], a[:, i.to(where)], a[i, i + 1], a[..., None], a[1:, i]
    a[i] = 9
    a.index_add_(0, i.to(where), torch.ones(2, 4, device=where))
    return a, *b


def test_values(device: Any) -> None:
    a = torch.ones(2, device=device)
    assert bool((a > 0).all())
    assert float(a[0]) == 1
    assert len(a) == 2
    assert [v.item() for v in a] == [1, 1]
    assert f"{a[0]:.2f}" == "1.00"
    assert a.tolist() == [1, 1]
    assert torch.equal(a, torch.ones(2, device=device))
    with pytest.raises(TypeError):
        a.numpy()


def test_printing(device: Any) -> None:
    assert repr(torch.ones(2, device=device)) == f"tensor([1., 1.], device='{device}')"
    parameter = nn.Parameter(torch.zeros(1, device=device))
    assert str(parameter) == f"Parameter containing:\ntensor([0.], device='{device}', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in str(parameter * 2)
    assert "dtype=torch.float64" in str(torch.ones(2, device=device, dtype=torch.float64))
    assert str(torch.arange(2000.0, device=device)).startswith("tensor([0.0000e+00, 1.0000e+00")
    assert str(torch.ones(2)) == "tensor([1., 1.])"


def test_random_numbers(device: Any, same_numbers: bool) -> None:
    def program(where: Any) -> Any:
        return torch.randn(5, device=where), torch.rand(3, device=where), torch.randint(9, (4,), device=where)

    if same_numbers:
        agree(program, device)
    torch.manual_seed(3)
    first = F.dropout(torch.ones(100, device=device), 0.5).cpu(), torch.randperm(10, device=device).cpu()
    torch.manual_seed(3)
    second = F.dropout(torch.ones(100, device=device), 0.5).cpu(), torch.randperm(10, device=device).cpu()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert 20 < (first[0] == 0).sum() < 80


def test_generators(device: Any, same_numbers: bool) -> None:
    generator = torch.Generator(device=device).manual_seed(4)
    assert generator.device == device
    first = torch.randn(4, device=device, generator=generator).cpu()
    if same_numbers:
        assert torch.equal(first, torch.randn(4, generator=torch.Generator().manual_seed(4)))
    state = generator.get_state()
    second = torch.randn(4, device=device, generator=generator).cpu()
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device=device, generator=generator).cpu(), second)
    assert isinstance(torch.default_generator, torch.Generator)
    assert type(torch.Generator()) is type(torch.default_generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device=device, generator=torch.Generator())


@agrees
def test_attention(where: Any) -> Any:
    q, k, v = (torch.randn(2, 4, 8, 16).to(where).requires_grad_() for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.pow(2).sum().backward()
    mask = torch.ones(8, 8, dtype=torch.bool).tril().to(where)
    return out, q.grad, k.grad, v.grad, F.scaled_dot_product_attention(q, k, v, mask)


def test_integers_are_counted_where_a_cpu_refuses(device: Any) -> None:
    """As on GPUs: models with experts count so wherever the device is not this machine's CPU."""
    chosen = torch.tensor([0, 2, 2, 3, 2], dtype=torch.int32)
    counts = torch.histc(chosen.to(device), bins=4, min=0, max=3)
    assert counts.dtype is torch.int32
    assert counts.tolist() == chosen.bincount(minlength=4).tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the CPU's
def test_transformers_in_evaluation(device: Any) -> None:
    """PyTorch has other operators for them then."""
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])

    def program(where: Any) -> Any:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).to(where).eval()
        attention = nn.MultiheadAttention(32, 4, batch_first=True).to(where).eval()
        x = torch.randn(2, 7, 32).to(where)
        with torch.no_grad():
            out, none = attention(x, x, x, need_weights=False)
            padded = model(x, src_key_padding_mask=padding.to(where))
            return out, none is None, attention(x, x, x), model(x), padded[~padding.to(where)]

    agree(program, device)


@pytest.mark.parametrize(("kind", "bidirectional"), [(nn.LSTM, True), (nn.GRU, True), (nn.RNN, False)])
def test_recurrent_layers(device: Any, kind: Any, bidirectional: bool) -> None:
    def program(where: Any) -> Any:
        model = kind(8, 16, 2, batch_first=True, bidirectional=bidirectional).to(where)
        x = torch.randn(2, 5, 8).to(where).requires_grad_()
        out, state = model(x)
        out.sum().backward()
        return out, state, model.weight_ih_l0.grad, x.grad

    agree(program, device)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
def test_autocast(device: Any) -> None:
    model = mlp().to(device)
    with torch.autocast("sky", dtype=torch.bfloat16):
        out = model(X.to(device))
        loss = F.cross_entropy(out, Y.to(device))
    loss.backward()
    assert out.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    here = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(here(X), Y)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=0.02)
    for mine, theirs in zip(here.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device: Any, other: Any, reentrant: bool) -> None:
    """The gradient of dropout is its mask: it was another one than that of the forward pass."""
    from torch.utils.checkpoint import checkpoint

    for where in (device, other):
        x = torch.ones(50, device=where, requires_grad=True)
        y = checkpoint(lambda x: nn.functional.dropout(x, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(y.detach().cpu(), x.grad.cpu())


def test_hooks_that_raise(device: Any) -> None:
    """What they raise ends the backward, and not the program."""

    def fail(*args: Any) -> None:
        raise LookupError("no") from KeyError("cause")

    def check(loss: Any) -> None:
        with pytest.raises(LookupError, match="no") as caught:
            loss.backward()
        assert isinstance(caught.value.__cause__, KeyError)

    model, x = nn.Linear(2, 2).to(device), torch.ones(2, device=device, requires_grad=True)
    for register in (lambda y: y.register_hook(fail), lambda y: y.grad_fn.register_prehook(fail)):
        y = x * 2
        register(y)
        check(y.sum())
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, fail):
        y = x.sin()
    check(y.sum())
    handle = model.register_full_backward_hook(fail)
    check(model(x).sum())
    handle.remove()
    threads = [threading.Thread(target=lambda: model(x).sum().backward()) for _ in range(2)]
    model.weight.register_post_accumulate_grad_hook(fail)
    check(model(x).sum())
    ended: list[Any] = []
    hook, threading.excepthook = threading.excepthook, lambda args: ended.append(args.exc_type)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert ended == [LookupError, LookupError]
    x.sum().backward()


def test_functional_transforms(device: Any) -> None:
    assert torch.func.vmap(lambda v: (v * v).sum())(torch.ones(3, 4, device=device)).tolist() == [4, 4, 4]
    gradient = torch.func.grad(lambda v: (v**2).sum())(torch.ones(3, device=device))
    assert gradient.tolist() == [2, 2, 2]


def test_functional_transforms_of_layers_that_are_one_instruction(device: Any) -> None:
    torch.manual_seed(0)
    query, x = torch.randn(2, 3, 4, 5), torch.randn(3, 2, 4)
    lstm = nn.LSTM(4, 5)

    def weights_of(module: nn.Module, x: Any) -> Any:
        weights = {name: value.detach() for name, value in module.named_parameters()}
        return torch.func.grad(lambda each: torch.func.functional_call(module, each, (x,))[0].sum())(weights)

    attention = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, q, q).sum())
    torch.testing.assert_close(attention(query.to(device)).cpu(), attention(query))
    expected = weights_of(lstm, x)
    found = weights_of(lstm.to(device), x.to(device))
    torch.testing.assert_close({name: value.cpu() for name, value in found.items()}, expected)


def test_tensors_of_different_places_do_not_mix(device: Any, other: Any, syncs: Callable[[], int]) -> None:
    before = syncs()
    with pytest.raises(RuntimeError, match="cpu"):
        torch.ones(2, device=device) + torch.ones(2)
    with pytest.raises(RuntimeError, match="one device"):
        torch.ones(2, device=device) + torch.ones(2, device=other)
    assert (torch.ones(2, device=device) + torch.tensor(1.0)).device == device
    assert syncs() == before


@pytest.mark.parametrize(
    ("weight", "x", "bias"),
    [((3,), (4, 3), None), ((3,), (3,), None), ((3,), (2, 4, 3), ()), ((3, 0), (4, 0), (3,)), ((0, 3), (4, 3), (0,))],
)
def test_linear_layers_without_rows_columns_or_that_dimension(
    device: Any, weight: tuple[int, ...], x: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    given = [torch.full(shape, 0.5) for shape in (x, weight, bias) if shape is not None]
    for casts in (False, True):
        found = []
        for place in ("cpu", device):
            tensors = [tensor.to(place).requires_grad_() for tensor in map(torch.Tensor.clone, given)]
            with torch.autocast("sky" if place == device else "cpu", torch.bfloat16, enabled=casts):
                result = nn.functional.linear(*tensors)
            result.sum().backward()
            found.append([result.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)])
        for expected, got in zip(*found, strict=True):
            assert got.shape == expected.shape and torch.allclose(got, expected), casts
