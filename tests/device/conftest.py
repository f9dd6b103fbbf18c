"""Remote devices on lab hosts that have this interpreter's torch.

With ``SKYFAB_TEST_DEVICE=process``, workers are forks of this process, and tests that need hosts are skipped: it is
for `./inv mutate`, which runs them hundreds of times.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from stage import traces

import skyfab as sky
from skyfab.device.batches import Batch
from skyfab.device.devices import open_device
from skyfab.device.stream import BATCH
from skyfab.host.device import entry
from skyfab.lab import Lab
from skyfab.protocol import codec, messages

torch = pytest.importorskip("torch")

IN_PROCESS = os.environ.get("SKYFAB_TEST_DEVICE") == "process"


_opened: list[tuple[Lab, sky.Compute]] = []
"""The pool that is open while tests of this folder follow each other: for each, torch is imported on both hosts."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Closes the pool before a test of another folder."""
    try:
        yield
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _close()


def _close() -> None:
    if _opened:
        lab, pool = _opened.pop()
        hosts = [host for host in lab.hosts if host.kind == "namespace"]
        with lab:
            pool.close()
            left = traces.left([lambda host=host: traces.on(host) for host in hosts])  # type: ignore[misc]
        assert not left, f"left behind by the tests of devices: {sorted(left)}"


def _import_tests() -> None:
    """Imports all tests of this folder: hosts can import modules that were imported here when their pool was opened.

    With `./inv test`, a file of tests is imported only when it is its turn, and would need a pool of its own.
    """
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        with contextlib.suppress(pytest.skip.Exception):  # a package is missing
            importlib.import_module(path.stem)


@pytest.fixture
def no_devices() -> None:
    """None is open."""
    _close()


@pytest.fixture(scope="module")
def remote_pool() -> sky.Compute:
    """Two hosts over SSH, of these tests' own. Other modules use it too: a test that ends a worker has its own pool."""
    if IN_PROCESS:
        pytest.skip("needs hosts")
    if not _opened:
        _import_tests()
        kind: Any = os.environ.get("SKYFAB_TEST_LAB", "auto")
        lab = Lab.start(count=2, kind=kind, python=sys.executable)
        traces.kept.add(str(lab.folder))
        pool = sky.Compute(inventory=lab.inventory, ui="none")
        _opened.append((lab, pool))
        pool.open()
    _, pool = _opened[0]
    for host in pool.hosts:
        pool.device("cpu", on=host.name)
    gc.collect()
    with contextlib.suppress(sky.DeviceError):
        sky.synchronize()  # neither a tensor nor an error of another module is left
    return pool


@pytest.fixture
def device_lab(remote_pool: sky.Compute) -> Lab:
    """The hosts of the pool."""
    return _opened[0][0]


def _work(connection: Connection) -> None:
    """The worker of a device, in a process that was forked for it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # they would be errors of operators, as they are of tests
    while (batch := connection.recv()) is not None:
        device, instructions, *carried = batch
        reply = entry.execute(device, instructions, *(memoryview(bytearray(part)) for part in carried))
        connection.send([reply.data, *map(bytes, reply.buffers)])
    os._exit(0)


class ForkedLink:
    """A worker in a fork of this process, as its stream sees it."""

    def __init__(self, number: int) -> None:
        self.name = f"node{number}"
        self._connection, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._sent: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, payload: codec.Payload, batch: Batch) -> None:
        device, instructions, *carried, _ = pickle.loads(payload.data, buffers=payload.buffers)
        self._sent.put(batch)
        self._connection.send([device, instructions, *map(bytes, carried)])

    def _read(self) -> None:
        while (batch := self._sent.get()) is not None:
            parts = list(map(memoryview, self._connection.recv()))
            batch.answered(messages.Result(parts=[len(part) for part in parts]), parts)

    def receive(self, batch: Batch) -> None:
        batch.block()

    def addresses_for(self, other: object) -> Sequence[str]:
        return ["127.0.0.1"]

    def notice(self, text: str) -> None:
        pass

    def may_wait(self) -> bool:
        return True

    def is_alive(self) -> bool:
        return True

    def close(self) -> None:
        self._sent.put(None)
        self._reader.join()
        self._connection.send(None)
        self._process.join()
        self._process.close()
        self._connection.close()


@pytest.fixture(scope="session")
def forked_links(request: pytest.FixtureRequest) -> Iterator[list[ForkedLink]]:
    """Two workers for each module, forked before the first backward: PyTorch refuses one in a fork after that."""
    modules = {item.path for item in request.session.items if "devices" in getattr(item, "fixturenames", ())}
    links = [ForkedLink(number) for _ in modules for number in (2, 1)]
    yield links
    for link in links:
        link.close()


@pytest.fixture(scope="module")
def devices(request: pytest.FixtureRequest) -> Iterator[list[torch.device]]:
    """The CPUs of both hosts."""
    if IN_PROCESS:
        links: list[ForkedLink] = request.getfixturevalue("forked_links")
        streams = [open_device("cpu", links.pop()) for _ in range(2)]
        yield [stream.torch_device for stream in streams]
        for stream in streams:
            stream.close()
            stream.link.close()
    else:
        pool: sky.Compute = request.getfixturevalue("remote_pool")
        yield [pool.device("cpu", on=host.name) for host in pool.hosts]


@pytest.fixture
def device(devices: list[torch.device]) -> torch.device:
    """The CPU of the first host."""
    return devices[0]


@pytest.fixture
def other(devices: list[torch.device]) -> torch.device:
    """The CPU of the second host."""
    return devices[1]


@pytest.fixture
def same_numbers() -> bool:
    """Whether the device has the random numbers of this machine's CPU."""
    return True


@pytest.fixture
def syncs(device: torch.device) -> Iterator[Callable[[], int]]:
    """How often the program has waited for a value of the device so far."""
    with sky.device.profile() as found:
        yield lambda: found.waits


class Failing:
    """``with failing:`` nothing is sent meanwhile, and the first instruction of the block fails on the host."""

    def __init__(self, device: Any) -> None:
        from skyfab.device import tensors

        self._stream = tensors.streams[device.index]
        self._table = torch.zeros(3, device=device)
        self._index = torch.tensor([9]).to(device)

    def __enter__(self) -> torch.Tensor:
        """Returns the result of the instruction."""
        sky.synchronize()
        self._stream.limit = BATCH  # after a wait, less is sent at a time
        self._stream._lock.acquire()
        return self._table[self._index]

    def __exit__(self, *_: object) -> None:
        self._stream._lock.release()


@pytest.fixture
def failing(device: torch.device) -> Failing:
    return Failing(device)


@pytest.fixture
def failing_on() -> Callable[[torch.device], Failing]:
    return Failing


@pytest.fixture
def line() -> Callable[[], int]:
    """``line()``: the number of the caller's line."""
    return lambda: sys._getframe(1).f_lineno
