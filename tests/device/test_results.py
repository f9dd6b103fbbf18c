"""What operators return on a remote device, and where: precision, strides, values, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky
from skyfab.protocol import codec

torch = pytest.importorskip("torch")
F = torch.nn.functional

pytestmark = pytest.mark.lab


# ---- precision under autocast: that of autocast on a GPU

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

OPERATORS: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "a product is computed in the lower precision": (lambda a: a @ a, F32, BF16),
    "also of a list of tensors": (lambda a: torch.einsum("ij,jk->ik", a, a), F32, BF16),
    "a convolution": (lambda a: F.conv1d(a[None], a[:, :, None]), F32, BF16),
    "with a bias": (lambda a: F.linear(a, a, a[0]), F32, BF16),
    "a layer of double precision": (lambda a: F.linear(a, a), F64, F64),
    "what needs the range of float32": (lambda a: a.softmax(0), BF16, F32),
    "what keeps the precision of its arguments": (lambda a: torch.addcmul(a, a, a), BF16, BF16),
    "and what autocast does not know": (lambda a: a + a, BF16, BF16),
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a processor without bfloat16
@pytest.mark.parametrize("name", OPERATORS)
def test_the_precision_of_operators(device: Any, name: str) -> None:
    program, given, expected = OPERATORS[name]
    a = torch.arange(16.0).view(4, 4).div(16)
    with torch.autocast("sky", dtype=BF16):
        found = program(a.to(given).to(device))
    assert found.dtype is expected
    torch.testing.assert_close(found.float().cpu(), program(a), rtol=0.02, atol=0.02)


# ---- strides, views and values


def test_memory_formats(device: Any) -> None:
    image = torch.arange(24.0).view(1, 2, 3, 4)
    last = torch.channels_last
    for there in (
        image.to(device, memory_format=last),
        image.to(device).to(memory_format=last),
        image.to(memory_format=last).to(device),
        torch.empty(1, 2, 3, 4, device=device, memory_format=last).copy_(image),
    ):
        assert there.is_contiguous(memory_format=last)
        assert torch.equal(there.cpu(), image)
    assert image.to(device).is_contiguous()


def test_a_result_that_only_cpus_keep(device: Any) -> None:
    x = torch.linspace(-2, 2, 5)
    mine, theirs = x.clone().requires_grad_(), x.to(device).requires_grad_()
    for one in (mine, theirs):
        F.logsigmoid(one).sum().backward()
    torch.testing.assert_close(theirs.grad.cpu(), mine.grad)


def test_a_result_that_gpus_do_not_keep() -> None:
    from skyfab.device import meta

    x = torch.empty(5, device="meta")
    for device, size in (("cpu", 5), ("cuda:0", 0)):
        result, _, _ = meta.predict(torch.ops.aten.log_sigmoid_forward.default, [x], {}, device)
        assert [one.shape for one in result] == [(5,), (size,)]


def test_more_views_than_are_kept(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyfab.device import tensors

    monkeypatch.setattr(tensors, "_MOST_VIEWS", 10)
    base = torch.arange(100.0, device=device)
    before = sky.memory(device)["tensors"]
    for _ in range(2):
        assert torch.stack([base[number:].sum() for number in range(50)])[-1].item() == sum(range(49, 100))
        assert torch.stack([base[number : number + 9] for number in range(50)])[:, 8].tolist() == [*range(8, 58)]
    assert sky.memory(device)["tensors"] <= before + 10


def test_more_kinds_of_operations_than_are_kept(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from skyfab.device import plans

    def planned() -> int:
        with sky.device.profile() as found:
            assert (torch.ones(3, device=device) + 1).tolist() == [2, 2, 2]
        return found.plans

    planned()
    assert planned() == 0
    monkeypatch.setattr(plans, "_MOST_PLANS", 20)
    sums = [torch.ones(size, device=device).sum() for size in range(1, 40)]
    assert [one.item() for one in sums] == list(range(1, 40))
    assert planned() > 0, "it was forgotten"


def test_a_plan_that_another_thread_forgets_while_it_is_used(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its instruction is made after a lookup, and sent after the plans were forgotten."""
    from skyfab.device.plans import forget_plans
    from skyfab.device.stream import DeviceStream

    x = torch.ones(3, device=device)
    assert (x + 1).tolist() == [2, 2, 2]
    emit = DeviceStream.emit

    def late(stream: DeviceStream, instruction: Any, **more: Any) -> None:
        if instruction[0] >= 0:
            forget_plans()
        emit(stream, instruction, **more)

    monkeypatch.setattr(DeviceStream, "emit", late)
    for _ in range(3):
        assert (x + 1).tolist() == [2, 2, 2]


def test_the_line_of_a_wait_is_the_programs_own(device: Any, line: Callable[[], int]) -> None:
    """Not one of PyTorch's, in which it waits."""
    a = torch.ones(3, device=device)
    with sky.device.profile() as found:
        at = line() + 1
        str(a)
    assert [one.site for one in found.lines] == [f"{__file__}:{at}"]


# ---- random numbers


def test_any_seed_is_the_same_there(device: Any, same_numbers: bool) -> None:
    if not same_numbers:
        pytest.skip("a GPU has other numbers")
    for seed in (-1, 2**63, 2**64 - 1):
        torch.manual_seed(seed)
        expected = torch.randn(3)
        torch.manual_seed(seed)
        assert torch.equal(torch.randn(3, device=device).cpu(), expected)
        mine, theirs = (torch.Generator(device=where).manual_seed(seed) for where in ("cpu", device))
        assert torch.equal(torch.randn(3, device=device, generator=theirs).cpu(), torch.randn(3, generator=mine))


def test_a_generator_that_is_dropped_is_freed_there(device: Any) -> None:
    from skyfab.device import tensors

    stream, generator = tensors.streams[device.index], torch.Generator(device=device)
    ident = generator.remote_id
    with stream._lock:  # nothing is sent meanwhile
        del generator
        assert ident in stream.freed


def test_each_device_has_a_state_of_its_own(device: Any, other: Any) -> None:
    torch.manual_seed(7)
    states = {where: torch.sky.get_rng_state(where) for where in (device, other)}
    first = torch.randn(4, device=other).cpu()
    assert not torch.equal(torch.sky.get_rng_state(other), states[other])
    assert torch.equal(torch.sky.get_rng_state(device), states[device]), "nothing was drawn there"
    torch.sky.set_rng_state(states[other], other)
    assert torch.equal(torch.randn(4, device=other).cpu(), first)


def test_a_remote_default_device(device: Any) -> None:
    generator = torch.Generator(device=device)
    with torch.device(device):
        torch.sky.set_rng_state(torch.sky.get_rng_state(device), device)
        generator.set_state(generator.get_state())
        with torch.random.fork_rng(devices=[device.index], device_type="sky"):
            first = torch.randn(4).tolist()
        assert torch.randn(4).tolist() == first
        made = torch.ones(2, 2)
        assert made.device == device
        assert [made.cpu().is_cpu, made[:0].cpu().is_cpu, sky.fetch(made).result().is_cpu] == [True] * 3
        with pytest.raises(ValueError, match="has no memory in this process"):
            codec.tensor_memory(made)


# ---- devices by name, and batches for them


def test_a_device_may_be_named(device: Any, other: Any) -> None:
    for where in (device, other):
        assert sky.memory(str(where)).keys() == sky.memory(where).keys()  # type: ignore[arg-type]
        assert sky.run_on(str(where), torch.ones, 2).device == where  # type: ignore[arg-type]
        assert sky.run_on(where, torch.ones, 2).device == where
    for wrong in ("cpu", "sky:127", torch.device("meta")):
        with pytest.raises(sky.UsageError, match="is not a remote device"):
            sky.memory(wrong)


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_are_prefetched_in_order(device: Any, depth: int) -> None:
    taken: list[int] = []

    def loader() -> Iterator[Any]:
        for number in range(5):
            taken.append(number)
            yield {"x": torch.full((2,), number), "n": number}

    for at, batch in enumerate(sky.prefetch(loader(), device, depth=depth)):
        assert (batch["n"], batch["x"].device, batch["x"].tolist()) == (at, device, [at, at])
        assert len(taken) == min(5, at + depth)
    with pytest.raises(sky.UsageError, match="depth=0"):
        next(sky.prefetch([], device, depth=0))
