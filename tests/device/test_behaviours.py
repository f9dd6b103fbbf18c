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
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"capturable": True}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
    ],
)
def test_optimizers(device: Any, optimizer: Any, options: Any) -> None:
    here, _, _ = train("cpu", optimizer, **{**options, "capturable": False} if "capturable" in options else options)
    there, _, _ = train(device, optimizer, **options)
    assert there == pytest.approx(here, abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": False}])
def test_a_step_waits_for_nothing(device: Any, syncs: Callable[[], int], options: Any) -> None:
    model = mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters(), **options)
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


def test_a_module_keeps_its_parameters(device: Any) -> None:
    model = mlp()
    weight = model[0].weight
    model.to(device)
    assert model[0].weight is weight
    assert type(weight) is nn.Parameter
    assert weight.device == device
    assert weight.is_leaf
    model.cpu()
    assert model[0].weight is weight
    assert weight.device.type == "cpu"


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


def test_data_parallel_is_that_of_a_machine_without_gpus(device: Any) -> None:
    layer, data = torch.nn.Linear(2, 1), torch.ones(3, 2)
    assert torch.equal(torch.nn.DataParallel(layer)(data), layer(data))
    remote = torch.nn.DataParallel(layer.to(device))(data.to(device))
    assert remote.device == device


def test_modules_of_this_machine_are_converted_as_without_a_device(device: Any) -> None:
    assert not torch.__future__.get_swap_module_params_on_conversion()
    assert nn.LazyLinear(3).to(device)(X.to(device)).shape == (32, 3)


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"num_workers": 2}])
def test_data_loaders(device: Any, options: Any) -> None:
    data = torch.utils.data.TensorDataset(X, Y)
    model = mlp().to(device)
    seen = 0
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, **options):
        loss = F.cross_entropy(model(x.to(device, non_blocking=True)), y.to(device))
        seen += len(x)
    assert loss.item() > 0
    assert seen == 32


def test_evaluation(device: Any) -> None:
    model = mlp()
    expected = model(X).detach()
    there = copy.deepcopy(model).to(device).eval()
    with torch.no_grad():
        torch.testing.assert_close(there(X.to(device)).cpu(), expected, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(there(X.to(device)).cpu(), expected, rtol=1e-4, atol=1e-5)


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


def test_optimizer_state(device: Any) -> None:
    _, model, optimizer = train(device, torch.optim.AdamW)
    second = torch.optim.AdamW(model.parameters())
    second.load_state_dict(optimizer.state_dict())
    assert second.state[model[0].weight]["exp_avg"].device == device


def test_deep_copies(device: Any) -> None:
    model = mlp().to(device)
    second = copy.deepcopy(model)
    with torch.no_grad():
        second[0].weight.zero_()
    assert model[0].weight.abs().sum().item() > 0
    assert second[0].weight.abs().sum().item() == 0
    assert type(second[0].weight) is nn.Parameter


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


@pytest.mark.parametrize("weights_only", [True, False])
def test_saving_and_loading(device: Any, weights_only: bool) -> None:
    model = mlp().to(device)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=weights_only)
    assert state["0.weight"].device.type == "cpu"
    assert torch.equal(state["0.weight"], model[0].weight.cpu())
    file.seek(0)
    there = torch.load(file, weights_only=weights_only, map_location=device)
    assert there["0.weight"].device == device


def test_pickling(device: Any) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    assert pickle.loads(pickle.dumps(parameter)).tolist() == [1, 1]
    assert pickle.loads(pickle.dumps(parameter.detach())).tolist() == [1, 1]


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


def test_out_arguments(device: Any) -> None:
    out = torch.empty(0, device=device)
    torch.add(torch.ones(3, device=device), 1, out=out)
    assert out.tolist() == [2, 2, 2]


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


def test_initialisation(device: Any, same_numbers: bool) -> None:
    torch.manual_seed(5)
    here = nn.Linear(8, 8, device="cpu" if same_numbers else device)
    torch.manual_seed(5)
    there = nn.Linear(8, 8, device=device)
    assert torch.equal(here.weight.cpu(), there.weight.cpu())
    assert torch.equal(here.bias.cpu(), there.bias.cpu())


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


def test_the_state_of_random_numbers(device: Any) -> None:
    state = torch.sky.get_rng_state(device)
    first = torch.randn(4, device=device).cpu()
    torch.sky.set_rng_state(state, device)
    assert torch.equal(torch.randn(4, device=device).cpu(), first)


@agrees
def test_convolutions(where: Any) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ).to(where)
    out = model(torch.randn(2, 3, 12, 12).to(where))
    out.sum().backward()
    return out, model[0].weight.grad, model[1].running_mean, model[1].num_batches_tracked


@pytest.mark.parametrize("causal", [False, True])
def test_attention(device: Any, causal: bool) -> None:
    def program(where: Any) -> Any:
        q, k, v = (torch.randn(2, 4, 8, 16).to(where).requires_grad_() for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.pow(2).sum().backward()
        mask = torch.ones(8, 8, dtype=torch.bool).tril().to(where)
        return out, q.grad, k.grad, v.grad, F.scaled_dot_product_attention(q, k, v, mask)

    agree(program, device)


def test_integers_are_counted_where_a_cpu_refuses(device: Any) -> None:
    """As on GPUs: models with experts count so wherever the device is not this machine's CPU."""
    chosen = torch.tensor([0, 2, 2, 3, 2], dtype=torch.int32)
    counts = torch.histc(chosen.to(device), bins=4, min=0, max=3)
    assert counts.dtype is torch.int32
    assert counts.tolist() == chosen.bincount(minlength=4).tolist()


@agrees
def test_transformers(where: Any) -> Any:
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(where)
    out = model(torch.randn(2, 7, 32).to(where))
    out.pow(2).mean().backward()
    return out, model.linear1.weight.grad, model.self_attn.in_proj_weight.grad


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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(device: Any, kind: Any, bidirectional: bool) -> None:
    def program(where: Any) -> Any:
        model = kind(8, 16, 2, batch_first=True, bidirectional=bidirectional).to(where)
        x = torch.randn(2, 5, 8).to(where).requires_grad_()
        out, state = model(x)
        out.sum().backward()
        return out, state, model.weight_ih_l0.grad, x.grad

    agree(program, device)


@agrees
def test_recurrent_layers_with_packed_sequences(where: Any) -> Any:
    model = nn.LSTM(8, 16).to(where)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 8).to(where), [5, 3])
    out, _ = model(packed)
    out.data.sum().backward()
    return out.data, model.weight_hh_l0.grad


@agrees
def test_recurrent_cells(where: Any) -> Any:
    cell, x = nn.LSTMCell(8, 4).to(where), torch.randn(3, 8).to(where)
    h, c = cell(x)
    (h + c).sum().backward()
    return h, c, cell.weight_ih.grad, nn.GRUCell(8, 4).to(where)(x)


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


def test_gradient_scaler(device: Any) -> None:
    model = mlp().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sky", init_scale=1024.0)
    before = model[0].weight.detach().cpu().clone()
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("sky", dtype=torch.float16):
            loss = F.cross_entropy(model(X.to(device)), Y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024
    assert not torch.equal(before, model[0].weight.cpu())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(device: Any, other: Any, reentrant: bool) -> None:
    """The gradient of dropout is its mask: it was another one than that of the forward pass."""
    from torch.utils.checkpoint import checkpoint

    for where in (device, other):
        x = torch.ones(50, device=where, requires_grad=True)
        y = checkpoint(lambda x: nn.functional.dropout(x, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(y.detach().cpu(), x.grad.cpu())


def test_second_derivatives(device: Any) -> None:
    x = torch.randn(3, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 6 * x.detach().cpu())


def test_hooks(device: Any) -> None:
    seen: list[Any] = []
    model = mlp().to(device)
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model[0].weight.register_hook(lambda grad: grad * 2)
    inner = model[:3](X.to(device))
    inner.retain_grad()
    model[3:](inner).sum().backward()
    assert seen == [torch.Size([32, 64])]
    assert inner.grad is not None
    assert model[0].weight.grad is not None


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(device: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0, raising=False)  # else a thread of its own stays
    model = mlp().to(device)
    expected = model(X.to(device)).detach().cpu()
    compiled = torch.compile(model, backend=backend)
    out = compiled(X.to(device))
    out.sum().backward()
    torch.testing.assert_close(out.detach().cpu(), expected, rtol=1e-4, atol=1e-4)
    assert model[0].weight.grad is not None


def test_tensors_of_different_places_do_not_mix(device: Any, other: Any, syncs: Callable[[], int]) -> None:
    before = syncs()
    with pytest.raises(RuntimeError, match="cpu"):
        torch.ones(2, device=device) + torch.ones(2)
    with pytest.raises(RuntimeError, match="one device"):
        torch.ones(2, device=device) + torch.ones(2, device=other)
    assert (torch.ones(2, device=device) + torch.tensor(1.0)).device == device
    assert syncs() == before


def test_two_hosts(device: Any, other: Any) -> None:
    a = torch.randn(3, 3).to(device)
    b = a.to(other)
    assert b.device == other
    assert torch.equal(a.cpu(), b.cpu())
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    x = torch.randn(3, 4)
    second(first(x)).sum().backward()
    expected = first.weight.grad.clone()
    first.zero_grad()
    first.to(device)
    second.to(other)
    second(first(x.to(device)).to(other)).sum().backward()
    torch.testing.assert_close(first.weight.grad.cpu(), expected)


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize(
    ("weight", "x", "bias"),
    [((3,), (4, 3), None), ((3,), (3,), None), ((3,), (2, 4, 3), ()), ((3, 0), (4, 0), (3,)), ((0, 3), (4, 3), (0,))],
)
def test_linear_layers_without_rows_columns_or_that_dimension(
    device: Any, weight: tuple[int, ...], x: tuple[int, ...], bias: tuple[int, ...] | None, casts: bool
) -> None:
    given = [torch.full(shape, 0.5) for shape in (x, weight, bias) if shape is not None]
    found = []
    for place in ("cpu", device):
        tensors = [tensor.to(place).requires_grad_() for tensor in map(torch.Tensor.clone, given)]
        with torch.autocast("sky" if place == device else "cpu", torch.bfloat16, enabled=casts):
            result = nn.functional.linear(*tensors)
        result.sum().backward()
        found.append([result.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)])
    for expected, got in zip(*found, strict=True):
        assert got.shape == expected.shape and torch.allclose(got, expected)
