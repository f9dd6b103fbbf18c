"""``torch.compile`` on a remote device: the same numbers as without it, in a few instructions.

Most graphs are executed as they are on the host, which takes no time to compile. Tests with Inductor are slow.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.device import graph_backend, remote_functions, tensors

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.lab

EAGER = {"there": "eager"}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is compiled yet."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0, raising=False)  # else a thread of its own stays
    remote_functions.noticed.clear()
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo has many
        yield
    torch._dynamo.reset()


@pytest.fixture
def notices(device: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is warned of."""
    found: list[str] = []
    monkeypatch.setattr(tensors.streams[device.index].link, "notice", found.append)
    return found


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled."""
    found: list[Any] = []
    original = graph_backend.compile_graph
    monkeypatch.setattr(graph_backend, "compile_graph", lambda *args: found.append(args[0]) or original(*args))
    return found


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def forward(self, x: Any) -> Any:
        return self.layers(x).pow(2).mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2), nn.BatchNorm2d(4)
        )

    def forward(self, x: Any) -> Any:
        return (self.layers(x).flatten(1).log_softmax(1) ** 2).mean()


class Block(nn.Module):
    """A layer like those of Llama: rotated attention, and a gated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(16), nn.RMSNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        angles = torch.arange(length, device=x.device)[:, None] * torch.tensor([1.0, 0.1], device=x.device)
        q, k = (torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
                for a, b in (q.chunk(2, -1), k.chunk(2, -1)))  # fmt: skip
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, 16))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """With tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(20, 16), nn.Sequential(Block(), Block())
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Any) -> Any:
        return F.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), ids.roll(-1, 1).flatten())


CASES = {
    "mlp": (Mlp, lambda rows: torch.randn(rows, 12)),
    "convolutions": (Convolutions, lambda rows: torch.randn(rows, 3, 10, 10)),
    "llama": (Llama, lambda rows: torch.randint(20, (rows, 6))),
}


def made(case: str, rows: int = 4) -> tuple[Any, Any]:
    """A model, and an input, on this machine's CPU."""
    torch.manual_seed(0)
    model, inputs = CASES[case]
    return model(), inputs(rows)


def trained(model: Any, call: Callable[[Any], Any], x: Any, steps: int = 3) -> list[Any]:
    """Losses, gradients, parameters and buffers, after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters()), *model.state_dict().values()]


def close(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    assert len(found) == len(expected)
    for theirs, mine in zip(found, expected, strict=True):
        torch.testing.assert_close(theirs.detach().cpu(), mine.detach(), rtol=tolerance, atol=tolerance)


def compare(case: str, device: Any, **options: Any) -> None:
    model, x = made(case)
    there = copy.deepcopy(model).to(device)
    found = trained(there, torch.compile(there, **options), x.to(device))
    assert all(tensor.device == device for tensor in found)
    close(found, trained(model, model, x))


@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers(device: Any, case: str, graphs: list[Any], notices: list[str]) -> None:
    compare(case, device, options=EAGER)
    assert len(graphs) == 1
    assert not notices


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_the_same_numbers_with_inductor(device: Any, case: str, graphs: list[Any], notices: list[str]) -> None:
    """The MLP's are those of `test_later_programs_find_what_was_compiled` too, in each run of the slow tests."""
    compare(case, device)
    assert len(graphs) == 1
    assert not notices


def test_the_backend_by_its_name(device: Any, graphs: list[Any]) -> None:
    compare("mlp", device, backend="sky", options=EAGER)
    assert "sky" in torch._dynamo.list_backends()
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{"backend": "sky"}, {"options": EAGER}])
def test_a_graph_without_remote_tensors_is_compiled_here(
    device: Any, options: dict[str, Any], graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        given.append(config_patches)
        return module.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    assert torch.compile(lambda x: x + 1, **options)(torch.ones(2)).tolist() == [2, 2]
    assert (given, graphs) == ([{}], [])


def test_a_step_is_a_few_instructions(device: Any) -> None:
    model, x = made("llama")
    model, x = model.to(device), x.to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled, step = torch.compile(model, options=EAGER), torch.compile(optimizer.step, options=EAGER)

    def one() -> None:
        loss = compiled(x)
        loss.backward()
        step()
        optimizer.zero_grad()

    for _ in range(3):
        one()
    with sky.device.profile() as found:
        for _ in range(10):
            one()
    assert found.operations <= 40  # forward, the first gradient, backward, the optimizer
    assert found.waits == 0
    assert found.plans == 0
    assert found.operations + found.others <= 60


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_compiled_optimizers(device: Any, name: str, graphs: list[Any], notices: list[str]) -> None:
    results = []
    for where in ("cpu", device):
        model, x = made("mlp")
        model, x = model.to(where), x.to(where)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        step = optimizer.step if where == "cpu" else torch.compile(optimizer.step, options=EAGER)
        for at in range(4):
            model(x).backward()
            (optimizer.step if at == 0 else step)()  # an optimizer that was used before it is compiled
            optimizer.zero_grad()
        results.append(list(model.parameters()))
    close(results[1], results[0])
    assert graphs
    assert not notices


@pytest.mark.slow
def test_a_whole_step(device: Any, graphs: list[Any]) -> None:
    model, x = made("mlp")
    results = []
    for where in ("cpu", device):
        there = copy.deepcopy(model).to(where)
        optimizer = torch.optim.AdamW(there.parameters(), lr=0.01)

        def step(x: Any, model: Any = there, optimizer: Any = optimizer) -> Any:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        call = step if where == "cpu" else torch.compile(step, options=EAGER)
        results.append([*(call(x.to(where)) for _ in range(4)), *there.parameters()])
    close(results[1], results[0])
    assert graphs


def test_dynamic_sizes(device: Any, graphs: list[Any]) -> None:
    model, _ = made("llama")
    there = copy.deepcopy(model).to(device)
    compiled = torch.compile(there, options=EAGER)
    for rows in (2, 3, 5, 7, 4):
        x = made("llama", rows)[1]
        for each in (model, there):
            each.zero_grad()
        found, expected = compiled(x.to(device)), model(x)
        found.backward()
        expected.backward()
        close([found, there.tokens.weight.grad], [expected, model.tokens.weight.grad])
    assert len(graphs) == 2  # one of the first size, and one of any


def test_sizes_are_dynamic_from_the_beginning(device: Any, graphs: list[Any]) -> None:
    compiled = torch.compile(lambda x: (x.sum(0) / x.shape[0], x.shape[0] * 2), dynamic=True, options=EAGER)
    for rows in (2, 3, 5):
        x = torch.arange(7.0 * rows).view(rows, 7)
        found, number = compiled(x.to(device))
        close([found], [x.mean(0)])
        assert number == 2 * rows
    assert len(graphs) == 1


def test_dropout_has_the_numbers_of_the_device(device: Any) -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5) + torch.rand_like(x), options=EAGER)
    x = torch.ones(50, device=device)
    torch.manual_seed(3)
    found = compiled(x)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.5) + torch.rand_like(x)
    assert torch.equal(found.cpu(), expected.cpu())
    assert not torch.equal(compiled(x).cpu(), expected.cpu())


def test_autocast_in_graphs(device: Any, graphs: list[Any]) -> None:
    model, x = made("llama")
    model, x = model.to(device), x.to(device)

    def inside(x: Any) -> Any:
        with torch.autocast("sky", dtype=torch.bfloat16):
            return model(x)

    with torch.autocast("sky", dtype=torch.bfloat16):
        expected, found = model(x), torch.compile(model, options=EAGER)(x)
        assert torch.compile(lambda x: x @ x, options=EAGER)(torch.ones(2, 2, device=device)).dtype == torch.bfloat16
    close([found, torch.compile(inside, options=EAGER)(x)], [expected.cpu()] * 2, 0.02)
    assert len(graphs) == 3


def test_autocast_inside_of_autocast(device: Any, graphs: list[Any], notices: list[str]) -> None:
    def step(x: Any) -> Any:
        kind = x.device.type
        before = x @ x
        with torch.autocast(kind, dtype=torch.bfloat16):
            first = x @ x
            with torch.autocast(kind, enabled=False):
                exact = x @ x
            second = (x @ x).float()
            with torch.autocast(kind, enabled=False):
                pass
        return before + x @ x, first, exact, second

    torch.manual_seed(0)
    x = torch.randn(16, 16)
    found, expected = torch.compile(step, options=EAGER)(x.to(device)), step(x)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    close(found, expected, 0.05)
    close([found[0], found[2]], [expected[0], expected[2]], 1e-5)
    assert len(graphs) == 1 and not notices


def test_changes_in_place(device: Any, graphs: list[Any], notices: list[str]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: Any, into: Any) -> Any:
            self.count.add_(1)
            into[0].copy_(x.detach().sum())
            return x * self.count

    module = Counting().to(device)
    compiled = torch.compile(module, options=EAGER)
    x, into = torch.ones(2, device=device, requires_grad=True), torch.zeros(3, 2, device=device)
    before, version = module.count, into._version
    for at in (1, 2, 3):
        assert compiled(x, into).tolist() == [at, at]
    assert module.count is before
    assert into.tolist() == [[2, 2], [0, 0], [0, 0]]
    assert into._version > version
    assert len(graphs) == 1
    assert not notices


def test_a_changed_input_is_an_error_in_backward(device: Any) -> None:
    w = torch.ones(2, device=device, requires_grad=True)
    out = torch.compile(lambda w: w * w, options=EAGER)(w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_parameter_that_forward_changes(device: Any) -> None:
    here = nn.Embedding(4, 3, max_norm=1.0)
    nn.init.constant_(here.weight, 2.0)
    there = copy.deepcopy(here).to(device)
    at = torch.tensor([1, 3])
    for model, compiled, where in ((here, here, "cpu"), (there, torch.compile(there, options=EAGER), device)):
        compiled(at.to(where)).pow(2).sum().backward()
        assert model.weight._version > 0
    torch.testing.assert_close(there.weight.cpu(), here.weight)
    torch.testing.assert_close(there.weight.grad.cpu(), here.weight.grad)


def test_what_has_no_gradient(device: Any) -> None:
    a, b = (torch.ones(2, device=device, requires_grad=True) for _ in range(2))
    program = torch.compile(lambda a, b: (a * 2 + b.detach(), a.detach() * 3, (a > 0).sum()), options=EAGER)
    found, constant, count = program(a, b)
    assert found.requires_grad
    assert not constant.requires_grad
    assert not count.requires_grad
    found.sum().backward()
    assert a.grad.tolist() == [2, 2]
    assert b.grad is None
    with torch.no_grad():
        assert not torch.compile(lambda a: a * 5, options=EAGER)(a).requires_grad
    with torch.inference_mode():
        assert torch.compile(lambda a: a * 7, options=EAGER)(a).tolist() == [7, 7]


def test_results_that_share_memory(device: Any) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        return y, y[0], x.view(-1)

    x = torch.ones(2, 2, device=device)
    y, row, flat = torch.compile(program, options=EAGER)(x)
    row.add_(1)
    flat.zero_()
    assert y.tolist() == [[3, 3], [2, 2]]
    assert x.tolist() == [[0, 0], [0, 0]]


def test_a_graph_break_continues(device: Any, graphs: list[Any]) -> None:
    def program(x: Any) -> Any:
        y = x * 2
        torch._dynamo.graph_break()
        if y.sum().item() > 0:
            y = y.sin()
        return y + 1

    x = torch.ones(3, device=device, requires_grad=True)
    traced: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.utils, "warn_once", traced.append)
        found = torch.compile(program, options=EAGER)(x)
    found.sum().backward()
    assert traced == [], "kernels of operators are not traced"
    here = torch.ones(3, requires_grad=True)
    program(here).sum().backward()
    close([found, x.grad], [program(here), here.grad])
    assert len(graphs) >= 2


def test_tensors_of_this_machine(device: Any, notices: list[str]) -> None:
    def program(x: Any, scale: Any) -> Any:
        y = x.to(device) * scale
        return y, y.cpu() + 1

    x, scale = torch.arange(3.0), torch.tensor(2.0)
    there, here = torch.compile(program, options=EAGER)(x, scale)
    assert (there.device, here.device.type) == (device, "cpu")
    assert there.tolist() == [0, 2, 4]
    assert here.tolist() == [1, 3, 5]
    made_there = torch.compile(lambda: torch.ones(2, device=device) * 3, options=EAGER)()
    assert (made_there.device, made_there.tolist()) == (device, [3, 3])
    assert not notices


def test_what_runs_operator_by_operator(device: Any, other: Any, notices: list[str]) -> None:
    def change(x: Any) -> Any:
        x.mul_(3)
        return x * 2

    w = torch.ones(2, device=device, requires_grad=True)
    x = w * 1
    found = torch.compile(change, options=EAGER)(x)
    (found + x).sum().backward()
    assert found.tolist() == [6, 6]
    assert w.grad.tolist() == [9, 9]
    assert notices == [
        "a part of a compiled function runs operator by operator: it changes an input in place that has a gradient"
    ]
    a, b = torch.ones(2, device=device), torch.ones(2, device=other)
    assert torch.compile(lambda a, b: a.to(other) + b, options=EAGER)(a, b).tolist() == [2, 2]


def test_checkpoints(device: Any, notices: list[str]) -> None:
    def program(x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False).sum()

    both(program, device)
    assert not notices


def both(program: Callable[[Any], Any], device: Any) -> None:
    """A function has the same result and gradient, compiled on the device."""
    results = []
    for where in ("cpu", device):
        x = torch.arange(3.0, device=where, requires_grad=True)
        found = (program if where == "cpu" else torch.compile(program, options=EAGER))(x)
        found.backward()
        results.append([found, x.grad])
    close(results[1], results[0])


@pytest.mark.parametrize(
    "function",
    [
        torch.func.grad(lambda x: x.sin().sum()),
        torch.func.hessian(lambda x: (x**3).sum()),
        torch.vmap(torch.func.grad(torch.sin)),
    ],
    ids=["grad", "hessian", "vmap"],
)
def test_gradients_inside_run_operator_by_operator(device: Any, notices: list[str], function: Any) -> None:
    """Also if no input requires a gradient: the host would compute none."""
    x = torch.arange(4.0)
    close([torch.compile(lambda x: function(x), options=EAGER)(x.to(device))], [function(x)])
    assert "torch.func" in notices[0]


def test_own_functions(device: Any, notices: list[str]) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 5 * ctx.saved_tensors[0]

    both(lambda x: Double.apply(x.sin()).sum(), device)
    assert "autograd_function_apply" in notices[0]


def test_backward_twice(device: Any) -> None:
    x = torch.ones(2, device=device, requires_grad=True)
    out = torch.compile(lambda x: (x * x).sum(), options=EAGER)(x)
    out.backward(retain_graph=True)
    out.backward()
    assert x.grad.tolist() == [4, 4]


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """What a logger of PyTorch, and those below it, say meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


def test_more_recompiles_than_the_limit(device: Any, graphs: list[Any]) -> None:
    compiled = torch.compile(lambda x, word: x * len(word), options=EAGER)
    x = torch.ones(2, device=device)
    with torch._dynamo.config.patch(recompile_limit=2), logged("torch._dynamo") as lines:
        for word in ("a", "bb", "ccc", "dddd"):
            assert compiled(x, word).tolist() == [len(word)] * 2
    assert len(graphs) == 2
    assert sum("recompile_limit" in line for line in lines) == 1  # PyTorch says so, once


@contextlib.contextmanager
def limited(device: Any, number: int) -> Iterator[None]:
    """The host's Dynamo compiles the same code at most so often."""

    def limit(number: int) -> int:
        from torch._dynamo import config

        before, config.recompile_limit = config.recompile_limit, number
        return int(before)

    before = sky.run_on(device, limit, number)
    try:
        yield
    finally:
        sky.run_on(device, limit, before)


def replace_inductor(kind: str) -> None:
    """Inductor on the host executes graphs as they are from now on, or raises an error; "" restores it."""
    from torch._inductor import compile_fx, exc

    def stand_in(graph: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "triton":
            raise exc.TritonMissing(None)
        if kind == "other":
            raise RuntimeError("no lowering of this\nand more")
        return graph.forward

    compile_fx.whole = getattr(compile_fx, "whole", compile_fx.compile_fx)
    compile_fx.compile_fx = stand_in if kind else compile_fx.whole


@contextlib.contextmanager
def inductor(device: Any, kind: str) -> Iterator[None]:
    """Inductor on the host is replaced meanwhile: its compiler takes a minute."""
    sky.run_on(device, replace_inductor, kind)
    try:
        yield
    finally:
        sky.run_on(device, replace_inductor, "")


def test_more_graphs_than_recompiles_there(device: Any, notices: list[str]) -> None:
    """The host's limit is that of one graph: a program may have more of them."""
    with inductor(device, "uncompiled"), limited(device, 2):
        for number in range(4):
            assert torch.compile(lambda x, by=number: x * by + 1)(torch.ones(1, device=device)).tolist() == [number + 1]
    assert not notices


def test_more_sizes_than_recompiles_there(device: Any, notices: list[str]) -> None:
    """The graph is executed uncompiled from then on."""
    compiled = torch.compile(lambda x: x.exp().sum(0), dynamic=True)
    with inductor(device, "uncompiled"), limited(device, 1):
        for rows in (2, 3, 5):
            x = torch.ones(rows, 2)
            close([compiled(x.to(device))], [x.exp().sum(0)])
    (notice,) = notices
    assert "its sizes vary too much" in notice


def test_a_model_that_gets_another_layer(device: Any, graphs: list[Any]) -> None:
    """Layers, sizes of parameters, and what is trained may change between steps."""
    model, x = made("mlp")
    there = copy.deepcopy(model).to(device)
    compiled = torch.compile(there, options=EAGER)

    def larger(model: Any) -> None:
        torch.manual_seed(1)
        where = model.layers[0].weight.device
        model.layers[3] = nn.Linear(16, 7).to(where)
        model.layers.append(nn.Tanh())

    def frozen(model: Any) -> None:
        model.layers[0].requires_grad_(False)

    for change in (lambda model: None, larger, frozen):
        results = []
        for each, call, where in ((model, model, "cpu"), (there, compiled, device)):
            change(each)
            each.zero_grad()
            loss = call(x.to(where))
            loss.backward()
            results.append([loss, *(p.grad for p in each.parameters() if p.grad is not None)])
        close(results[1], results[0])
    assert len(graphs) == 3


def test_a_model_that_changes(device: Any, graphs: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).to(device)
    compiled = torch.compile(model, options=EAGER)
    x = torch.ones(2, 3, device=device)
    compiled(x)
    model.eval()
    assert torch.equal(compiled(x).cpu(), model(x).cpu())
    assert len(graphs) == 2


def test_an_error_names_the_line(device: Any, line: Callable[[], int]) -> None:
    compiled = torch.compile(lambda table, at: table[at] * 2, options=EAGER)
    table = torch.ones(3, device=device)
    compiled(table, torch.tensor([1], device=device))
    wrong = torch.tensor([7], device=device)
    begin = line()
    compiled(table, wrong)
    with pytest.raises(sky.DeviceError, match=r"out of (bounds|range)") as found:
        sky.synchronize()
    assert any(f"{__file__}:{number}" in str(found.value) for number in range(begin - 4, begin + 2))
    assert compiled(table, torch.tensor([2], device=device)).tolist() == [2]


def test_what_inductor_cannot_compile_runs_uncompiled(device: Any, notices: list[str]) -> None:
    """Without options the host compiles graphs; here its compiler is missing."""

    def lose_compiler() -> None:
        from torch._inductor import config

        config.cpp.cxx = ("no-such-compiler",)

    def find_compiler() -> None:
        from torch._inductor import config

        config.cpp.cxx = (None, "g++")

    sky.run_on(device, lose_compiler)
    try:
        compiled = torch.compile(lambda x: (x * 2).sin())
        x = torch.ones(3, device=device, requires_grad=True)
        found = compiled(x)
        found.sum().backward()
        close([found, x.grad], [torch.full((3,), 2.0).sin(), 2 * torch.full((3,), 2.0).cos()])
        compiled(x)
    finally:
        sky.run_on(device, find_compiler)
    assert len(notices) == 1
    assert "C++ compiler" in notices[0]
    assert __file__ in notices[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("triton", "the host's Python needs the package triton"), ("other", "RuntimeError: no lowering of this (at")],
)
def test_what_inductor_says_is_passed_on_once(device: Any, notices: list[str], kind: str, text: str) -> None:
    with inductor(device, kind):
        for number in (1, 2):
            compiled = torch.compile(lambda x, by=number: (x * by).exp())
            x = torch.ones(2, device=device, requires_grad=True)
            compiled(x).sum().backward()
            close([x.grad], [number * torch.full((2,), float(number)).exp()])
    (notice,) = notices
    assert notice.startswith("Inductor cannot compile a graph there, which is executed uncompiled: ")
    assert text in notice


def test_options_are_passed_on(device: Any) -> None:
    torch.compile(lambda x: x + 1, options={**EAGER, "fallback_random": True})(torch.ones(2, device=device))

    def options() -> list[dict[str, Any]]:
        from skyfab.host.device import composite_host

        found = [each.module for each in composite_host.MODULES.values()]
        return [module.options for module in found if hasattr(module, "options")]

    assert {"fallback_random": True} in sky.run_on(device, options)


@pytest.mark.parametrize("backend", ["inductor", "sky"])
def test_a_mode_is_one_of_inductors(device: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(graph_backend, "compile_graph", lambda *args: found.append(args) or args[0].forward)
    mode = "max-autotune-no-cudagraphs"
    assert torch.compile(lambda x: x + 2, backend=backend, mode=mode)(torch.ones(1, device=device)).tolist() == [3]
    ((_, options),) = found
    assert options["max_autotune"] is True


@pytest.mark.parametrize("options", [{}, {"options": EAGER}])
def test_cuda_graphs_are_asked_for_there(device: Any, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode may be given together with the option of remote devices."""
    found: list[Any] = []
    monkeypatch.setattr(graph_backend, "compile_graph", lambda *args: found.append(args) or args[0].forward)
    compiled = torch.compile(lambda x: x + 4, mode="reduce-overhead", **options)
    assert compiled(torch.ones(1, device=device)).tolist() == [5]
    ((_, given),) = found
    assert given == {"triton.cudagraphs": True, "there": "eager" if options else "inductor"}
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(lambda x: x, mode="reduce-overhead", options={**EAGER, "fallback_random": True})


@pytest.mark.slow
def test_random_numbers_and_numbers_that_change_with_inductor(device: Any, notices: list[str]) -> None:
    compiled = torch.compile(lambda x, scale: F.dropout(x, 0.5) * scale, options={"fallback_random": True})
    x = torch.ones(50, device=device)
    for scale in (1.5, 2.5, 3.5):
        torch.manual_seed(3)
        found = compiled(x, scale)
        torch.manual_seed(3)
        close([found], [(F.dropout(x, 0.5) * scale).cpu()])
    assert not notices


def test_invalid_options(device: Any) -> None:
    x = torch.ones(2, device=device)
    with pytest.raises(Exception, match="invalid option there='nowhere': expected 'inductor' or 'eager'"):
        torch.compile(lambda x: x + 1, options={"there": "nowhere"})(x)
    with pytest.raises(RuntimeError, match="no_such_option"):
        torch.compile(lambda x: x + 2, options={"no_such_option": 1})(x)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda x: torch._dynamo.graph_break() or x, fullgraph=True, options=EAGER)(x)
    with pytest.raises(RuntimeError, match="no_such_mode"):
        torch.compile(lambda x: x + 3, mode="no_such_mode")(x)


def compiled_there() -> dict[str, int]:
    """How many graphs Inductor has compiled on the host, and how many it has found in its cache."""
    from torch._dynamo.utils import counters

    caches = (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache"))
    return {how: sum(counters[part][f"{cache}_{how}"] for part, cache in caches) for how in ("hit", "miss")}


@pytest.mark.slow
def test_later_programs_find_what_was_compiled(
    lent_lab: Any, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's cache on the host has it: it does not compile the same graph again, and the numbers are the same."""
    notices: list[str] = []
    host = next(iter(sky.Inventory.of(lent_lab.inventory).hosts.values()))
    cache = lent_lab.hosts[0].run(["mktemp", "-d"]).stdout.strip()
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        with sky.Compute([host], ui="none", env={"TORCHINDUCTOR_CACHE_DIR": cache}) as compute:
            device = compute.device("cpu")
            monkeypatch.setattr(tensors.streams[device.index].link, "notice", notices.append)
            compare("mlp", device)
            found.append(sky.run_on(device, compiled_there))
    assert found[0]["miss"] > 0
    assert found[1]["hit"] > 0
    assert found[1]["miss"] == 0
    assert len(graphs) == 2, "one of each program"
    assert not notices
