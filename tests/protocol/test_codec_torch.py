"""codec and torch: tensors travel by storage, so that what shared memory here shares memory there."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest

os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else it keeps a file open for ever
torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from test_codec import land, there  # noqa: E402  # after the check that there is a torch

from skyfab.protocol import codec  # noqa: E402
from skyfab.protocol.codec import dumps, loads  # noqa: E402

pytestmark = pytest.mark.torch

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---- tensors of every kind

big = 5000

TENSORS = {
    "float": lambda: torch.arange(float(big)),
    "small": lambda: torch.arange(3),
    "zero dim": lambda: torch.tensor(3.5),
    "zero size": lambda: torch.zeros(0, 5),
    "bool": lambda: torch.arange(big) % 2 == 0,
    "bfloat16": lambda: torch.arange(big).bfloat16(),
    "complex": lambda: torch.arange(big) * 1j,
    "uint16": lambda: torch.arange(big).to(torch.uint16),
    "float8": lambda: torch.arange(big).remainder(16).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.arange(big).reshape(50, 100).T,
    "a column": lambda: torch.arange(big).reshape(50, 100)[:, 7],
    "expanded": lambda: torch.arange(50).expand(100, 50),
    "a slice": lambda: torch.arange(big)[1000:1010],
    "channels last": lambda: torch.rand(2, 3, 32, 32).contiguous(memory_format=torch.channels_last),
    "conjugate": lambda: (torch.arange(big) * (1 + 1j)).conj(),
    "negative view": lambda: torch.zeros(10, dtype=torch.complex64).conj().imag,
    "from numpy": lambda: torch.from_numpy(np.arange(big)),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_a_tensor_comes_back_as_it_was(make: Any) -> None:
    """Values, type, shape, strides and offset; and it can be written to."""
    value = make()
    again = there(value)
    assert type(again) is type(value)
    assert again.dtype == value.dtype
    assert again.shape == value.shape
    assert again.stride() == value.stride()
    assert again.storage_offset() == value.storage_offset()
    assert again.is_conj() == value.is_conj()
    if value.dtype is torch.float8_e4m3fn:
        value, again = value.view(torch.uint8), again.view(torch.uint8)
    assert torch.equal(again, value)
    if again.numel() and "expand" not in str(make):
        again.untyped_storage()[0] = 1


def test_requires_grad_and_parameters_stay_what_they_are() -> None:
    leaf = torch.arange(2000.0, requires_grad=True)
    assert there(leaf).requires_grad
    assert not there(leaf.detach()).requires_grad
    weight = torch.nn.Parameter(torch.rand(50, 50))
    again = there(weight)
    assert type(again) is torch.nn.Parameter
    assert again.requires_grad
    assert torch.equal(again, weight)
    frozen = there(torch.nn.Parameter(torch.rand(5), requires_grad=False))
    assert not frozen.requires_grad


def test_sparse_tensors_travel() -> None:
    value = torch.eye(100).to_sparse()
    again = there(value)
    assert again.layout == value.layout
    assert torch.equal(again.to_dense(), value.to_dense())


def test_meta_tensors_travel() -> None:
    """Shapes without content; a model can be sent before it has weights."""
    again = there(torch.empty(10_000, 10_000, device="meta"))
    assert again.is_meta
    assert again.shape == (10_000, 10_000)
    model = torch.nn.Linear(1000, 1000, device="meta")
    assert there(model).weight.is_meta


# ---- memory


def test_a_large_tensor_leaves_as_a_view_of_its_own_memory() -> None:
    value = torch.rand(1_000_000)
    payload = dumps([value])
    assert len(payload.data) < 4000
    assert [view.nbytes for view in payload.buffers] == [4_000_000]
    assert np.frombuffer(payload.buffers[0], np.uint8).__array_interface__["data"][0] == value.data_ptr()


def test_the_memory_outlives_the_tensor_while_it_is_on_its_way() -> None:
    """The caller may forget the tensor: the buffers keep its storage until they are sent."""
    value = torch.full((100_000,), 7)
    payload = dumps(value)
    del value
    gc.collect()
    noise = [torch.zeros(100_000, dtype=torch.int64) for _ in range(20)]
    assert bool((loads(payload.data, land(payload)) == 7).all())
    assert noise


# ---- what shared memory still does


def test_views_share_their_storage_after_the_journey() -> None:
    base = torch.zeros(100, 100)
    payload = dumps({"base": base, "row": base[3], "turned": base.T, "flat": base.view(-1)})
    assert len(payload.buffers) == 1
    again = loads(payload.data, land(payload))
    again["base"][3, 4] = 5.0
    assert again["row"][4] == again["turned"][4, 3] == again["flat"][304] == 5.0


@pytest.mark.parametrize("size", [10, 10_000])
def test_views_of_another_type_share_their_storage_too(size: int) -> None:
    """Two TypedStorages over one UntypedStorage; in band and beside it."""
    base = torch.zeros(size)
    floats, ints = there((base, base.view(torch.int32)))
    floats[0] = 1.0
    assert ints[0] == 0x3F800000


def test_tied_weights_stay_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(500, 16)
            self.head = torch.nn.Linear(16, 500, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.embedding(x))

    model = Tied()
    again = there(model)
    assert again.head.weight is again.embedding.weight
    assert len(list(again.parameters())) == 1
    x = torch.arange(10)
    assert torch.equal(again(x), model(x))
    again(x).sum().backward()
    with torch.no_grad():
        again.embedding.weight.add_(1)
    assert torch.equal(again.head.weight, again.embedding.weight)


def test_an_optimizer_still_trains_the_model_it_came_with() -> None:
    """Sent together, its parameter groups are the model's parameters; its moments came along."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    expected = copy.deepcopy(model.state_dict())
    model2, optimizer2 = there((model, optimizer))
    assert [id(p) for p in model2.parameters()] == [id(p) for p in optimizer2.param_groups[0]["params"]]
    step(model, optimizer)
    step(model2, optimizer2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, model2.state_dict()[name]), name
        if value.is_floating_point():
            assert not torch.equal(value, expected[name])


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.linspace(0, 1, 32 * 8).reshape(8, 32)).pow(2).sum().backward()
    optimizer.step()


# ---- storages themselves


def test_untyped_storages_travel_and_stay_shared() -> None:
    base = torch.arange(2000)
    storage, tensor = there((base.untyped_storage(), base))
    assert type(storage) is torch.UntypedStorage
    assert storage.data_ptr() == tensor.untyped_storage().data_ptr()
    assert storage.nbytes() == 16_000


def test_empty_storages_travel() -> None:
    assert there(torch.UntypedStorage(0)).nbytes() == 0
    first, second = there((torch.zeros(0), torch.zeros(0, 3)))
    assert first.shape == (0,)
    assert second.shape == (0, 3)
    first.resize_(5)


# ---- devices


def test_what_was_on_a_gpu_arrives_on_the_cpu_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage of a GPU tensor, as it is rebuilt on a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = bytearray(torch.arange(1000, dtype=torch.float32).numpy().tobytes())
    for device in ("cuda:0", "cuda:7", "cuda", "cpu", "mps:0"):
        storage = codec._storage(memoryview(memory), device)
        assert storage.device.type == "cpu"
        tensor = torch.tensor([], dtype=torch.float32).set_(storage)
        assert torch.equal(tensor, torch.arange(1000.0))
        assert codec._storage(b"", device).device.type == "cpu"


@pytest.mark.parametrize(("device", "place"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:2", 0), ("cuda:7", 0)])
def test_what_was_on_a_gpu_arrives_on_that_gpu_or_the_first(
    device: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert codec.torch_device(device) == f"cuda:{place}"
    assert codec.torch_device("cpu") == codec.torch_device("mps:0") == "cpu"


@gpu
def test_views_and_tied_weights_on_a_gpu_stay_tied() -> None:
    base = torch.zeros(100, 100, device="cuda")
    payload = dumps((base, base[3], base.T))
    assert len(payload.buffers) == 1
    again, row, turned = loads(payload.data, land(payload))
    assert again.device.type == there(torch.zeros(0, 5, device="cuda")).device.type == "cuda"
    again[3, 4] = 5
    assert row[4].item() == turned[4, 3].item() == 5
    model = torch.nn.Linear(64, 64).cuda()
    one, two = there((model, model.weight))
    assert one.weight is two


@gpu
def test_a_model_from_a_gpu_loads_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = dumps(torch.nn.Linear(64, 64).cuda())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    again = loads(payload.data, land(payload))
    assert again.weight.device.type == "cpu"
    assert again(torch.ones(1, 64)).shape == (1, 64)
