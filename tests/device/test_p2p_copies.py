"""Copies from one device to another: the bytes go from host to host, and nothing else gets in between."""

from __future__ import annotations

import functools
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stage.labs import start
from stage.spot import until
from stage.threads import at_once

import skyfab as sky
from skyfab._util.certificate import new_certificate
from skyfab.host import channel
from skyfab.host.channel import Channel, ChannelBroken, NotSent
from skyfab.lab import Lab

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.lab

MANY = 2_000_000
"""Elements of a tensor that would be noticed on its way through here."""


@pytest.fixture
def linked(device: Any, other: Any) -> tuple[Any, Any]:
    """Two devices with channels both ways."""
    torch.ones(1, device=device).to(other)
    torch.ones(1, device=other).to(device)
    return device, other


def same(found: Any, expected: Any) -> None:
    found = found.cpu()
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


# ---- copies


TENSORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "matrix": (lambda: torch.randn(30, 40), lambda t: t),
    "transposed": (lambda: torch.randn(30, 40), lambda t: t.t()),
    "steps": (lambda: torch.randn(30, 40), lambda t: t[3::5, ::7]),
    "without elements": (lambda: torch.randn(3, 0, 2), lambda t: t),
    "without dimensions": (lambda: torch.tensor(2.5), lambda t: t),
    "channels last": (lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), lambda t: t),
    "bool": (lambda: torch.rand(9) > 0.5, lambda t: t),
    "bfloat16": (lambda: torch.randn(9, 2).bfloat16(), lambda t: t),
    "float8": (lambda: torch.randn(9).to(torch.float8_e5m2), lambda t: t),
    "conjugated": (lambda: torch.randn(3, 4, dtype=torch.complex128), lambda t: t.conj()),
    "negated": (lambda: torch.randn(3, 4, dtype=torch.complex64), lambda t: t.conj().imag),
    "not numbers": (lambda: torch.tensor([float("nan"), float("inf"), -0.0]), lambda t: t),
}
"""Tensors, and views of them that are copied."""


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_all_kinds(linked: tuple[Any, Any], name: str) -> None:
    first, second = linked
    make, view = TENSORS[name]
    data = make()
    there = view(data.to(first))
    with sky.device.profile() as found:
        copied = there.to(second)
    assert found.waits == 0
    assert copied.device == second
    assert copied.stride() == view(data).clone().stride()
    same(copied.resolve_conj(), view(data).resolve_conj().resolve_neg())


def test_equal_elements_are_sent_once(linked: tuple[Any, Any]) -> None:
    first, second = linked
    with sky.device.profile() as found:
        copied = torch.ones(1, 50, device=first).expand(1000, 50).to(second)
    same(copied, torch.ones(1000, 50))
    assert found.bytes_copied == 200


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_conversions_send_the_smaller_of_both(linked: tuple[Any, Any], dtype: Any) -> None:
    first, second = linked
    data = torch.tensor([-1.7, 0.0, 1.1, 300.0])
    with sky.device.profile() as found:
        copied = data.to(first).to(second, dtype)
    same(copied, data.to(dtype))
    assert found.bytes_copied == 4 * min(4, dtype.itemsize)


def test_copies_into_tensors(linked: tuple[Any, Any]) -> None:
    first, second = linked
    row, table = torch.randn(5), torch.zeros(4, 3, 5, dtype=torch.float64)
    there = table.to(second)
    there[1:3, ::2].copy_(row.to(first))
    table[1:3, ::2].copy_(row)
    same(there, table)
    with pytest.raises(RuntimeError, match="expanded size"):
        there.copy_(torch.ones(7, device=first))
    same(there, table)


def test_what_is_changed_afterwards_is_not_sent(linked: tuple[Any, Any]) -> None:
    first, second = linked
    a = torch.zeros(100_000, device=first)
    copied = []
    for _ in range(20):
        copied.append(a.to(second))
        a.add_(1)
    assert [tensor.sum().item() for tensor in copied] == [100_000.0 * number for number in range(20)]


def test_both_ways_at_once_from_many_threads(linked: tuple[Any, Any]) -> None:
    def work(number: int) -> Any:
        first, second = linked if number % 2 else linked[::-1]
        a = torch.full((300_000,), float(number), device=first)
        for _ in range(10):
            b = a.to(second) + 1
            a.copy_(b)
        return a.mean().item()

    assert at_once(work, range(4), 90) == [number + 10.0 for number in range(4)]


# ---- gradients


def trained(first: Any, second: Any, steps: int) -> tuple[list[float], list[Any]]:
    torch.manual_seed(3)
    lower = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32))
    upper = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(24, 16), torch.randint(4, (24,))
    lower.to(first)
    upper.to(second)
    x, y = x.to(first), y.to(second)
    optimizer = torch.optim.AdamW([*lower.parameters(), *upper.parameters()], lr=0.01)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(upper(lower(x).to(second)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [weights.detach().cpu() for weights in lower.parameters()]


def test_a_model_on_two_hosts_trains_as_it_does_here(linked: tuple[Any, Any]) -> None:
    expected, weights = trained("cpu", "cpu", 12)
    losses, found = trained(*linked, 12)
    assert losses == pytest.approx(expected, rel=1e-5)
    for a, b in zip(found, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_step_over_two_hosts_waits_for_nothing(linked: tuple[Any, Any]) -> None:
    first, second = linked
    lower, upper = nn.Linear(500, 500).to(first), nn.Linear(500, 500).to(second)
    x = torch.randn(500, 500).to(first)
    with sky.device.profile() as found:
        for _ in range(5):
            upper(lower(x).to(second)).square().mean().backward()
    sky.synchronize()
    assert found.waits == 0
    assert (found.copies, found.bytes_copied) == (10, 10 * 1_000_000)
    assert found.bytes_received + found.bytes_sent < 100_000


def test_gradients_of_copies_into_a_tensor(linked: tuple[Any, Any]) -> None:
    first, second = linked
    a = torch.randn(3, device=first, requires_grad=True)
    b = torch.zeros(2, 3, device=second, dtype=torch.float64).copy_(a)
    (b * torch.tensor([[1.0], [2.0]], dtype=torch.float64).to(second)).sum().backward()
    same(a.grad, torch.full((3,), 3.0))


# ---- failures


def test_a_sender_that_has_failed_is_no_reason_to_wait(
    linked: tuple[Any, Any], remote_pool: sky.Compute, failing: Any, line: Any
) -> None:
    from skyfab.device import tensors

    first, second = linked
    kept = torch.zeros(2, device=second)
    with failing as bad, tensors.streams[second.index]._lock:  # no error is known meanwhile
        copied_at = line() + 1
        copied = bad.to(second)
        kept.add_(1)
    with pytest.raises(sky.DeviceError) as raised:
        copied.tolist()
    text = str(raised.value)
    names = [host.name for host in remote_pool.hosts]
    assert text.startswith(f"{names[1]}: copy_() at {__file__}:{copied_at}")
    assert f"{names[0]} did not send it: IndexError: index 9" in text
    with pytest.raises(sky.DeviceError, match="index 9 is out of bounds"):
        torch.zeros(1, device=first).item()
    assert kept.tolist() == [0, 0]
    with pytest.raises(sky.DeviceError, match="has no value"):
        copied.tolist()
    same(torch.arange(4, device=first).to(second), torch.arange(4))


def test_a_receiver_that_has_failed_does_not_hold_up_the_sender(linked: tuple[Any, Any], failing_on: Any) -> None:
    first, second = linked
    a = torch.ones(MANY, device=first)
    with failing_on(second):
        copies = [a.to(second) for _ in range(50)]  # more than may wait to be sent
    assert a.sum().item() == MANY
    with pytest.raises(sky.DeviceError, match="out of bounds"):
        copies[-1].sum().item()
    same((a + 1).to(second).mean(), torch.tensor(2.0))


def break_channels() -> None:
    """Runs in a worker: its connections end."""
    from skyfab.host.device import worker

    for one in worker.executor("cpu")._channels._channels.values():
        one.close()


def test_a_connection_that_ends_is_an_error_once(linked: tuple[Any, Any], remote_pool: sky.Compute, line: Any) -> None:
    first, second = linked
    sky.run_on(first, break_channels)
    copied_at = line() + 1
    copied = torch.ones(3, device=first).to(second)
    with pytest.raises(sky.DeviceError) as raised:
        copied.tolist()
    names = [host.name for host in remote_pool.hosts]
    assert f"{names[1]}: copy_() at {__file__}:{copied_at}" in str(raised.value)
    assert f"the connection from {names[0]} ended" in str(raised.value)
    with pytest.raises(sky.DeviceError, match=f"the connection from {names[1]} ended"):
        torch.ones(3, device=second).to(first).tolist()
    for one, two in (linked, linked[::-1]):
        same(torch.ones(3, device=one).to(two), torch.ones(3))  # over a new one
    with sky.device.profile() as found:
        same(torch.ones(3, device=first).to(second), torch.ones(3))
    assert found.copies == 1


def pool_on(lab: Lab, *names: int, **options: Any) -> sky.Compute:
    hosts = list(sky.Inventory.of(lab.inventory).hosts.values())
    return sky.Compute([hosts[number] for number in names], ui="none", **options)


def devices_of(pool: sky.Compute) -> list[Any]:
    return [pool.device("cpu", on=host.name) for host in pool.hosts]


@pytest.mark.slow
def test_a_worker_that_is_killed_in_the_middle(lent_lab: Lab) -> None:
    with pool_on(lent_lab, 2, 3) as pool:
        first, second = devices_of(pool)
        a, kept = torch.ones(MANY, device=first), torch.ones(2, device=second)
        a.to(second)
        pid = sky.run_on(first, os.getpid)
        (process,) = [process for process in lent_lab[pool.hosts[0].name].processes() if process.pid == pid]

        def go_on() -> None:
            for number in range(100_000):
                b = a.to(second).sum()
                if number == 10:
                    os.kill(process.outside, signal.SIGKILL)
                if number % 10 == 9:
                    b.item()

        with pytest.raises((sky.WorkerDied, sky.DeviceError)):
            go_on()
        with pytest.raises(sky.WorkerDied, match="tensors are lost"):
            until(lambda: a.sum().item() == 0)
        try:
            sky.synchronize()
        except sky.DeviceError as error:
            assert f"the connection from {pool.hosts[0].name} ended" in str(error)  # noqa: PT017
        assert (kept + 1).tolist() == [2, 2]
        again = pool.device("cpu", on=pool.hosts[0].name)
        same(torch.ones(3, device=again).to(second), torch.ones(3))


@pytest.mark.slow
def test_a_pool_closes_while_a_device_waits_for_another(lent_lab: Lab) -> None:
    def sleep() -> Iterator[int]:
        import time

        time.sleep(0.05)
        yield 1
        time.sleep(3600)
        yield 2

    with pool_on(lent_lab, 2, 3) as pool:
        first, second = devices_of(pool)
        a = torch.ones(3, device=first)
        a.to(second)
        values = sky.run_on(first, sleep)
        assert next(values) == 1  # the next one was asked for ahead, and the device is busy with it
        waiting = a.to(second)
    with pytest.raises(sky.UsageError, match="closed"):
        waiting.tolist()


# ---- networks


@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other() -> None:
    with start(2, isolated=True, python=sys.executable) as lab, pool_on(lab, 0, 1) as pool:
        notices: list[str] = []
        pool.events.subscribe(lambda event: notices.append(str(event)))
        first, second = devices_of(pool)
        data = torch.randn(100, 100)
        same(data.to(first).to(second), data)
        with sky.device.profile() as found:
            same(data.to(second).to(first), data)
            moved = data.to(first).to(second)
        same(moved, data)
        assert found.copies == 0
        assert found.bytes_received > 80_000
        assert len([text for text in notices if "go through this program" in text]) == 1
        expected, _ = trained("cpu", "cpu", 3)
        losses, _ = trained(first, second, 3)
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
def test_hosts_find_the_network_that_is_between_them() -> None:
    with start(2, isolated=True, second_network=True, python=sys.executable) as lab, pool_on(lab, 0, 1) as pool:
        assert copies_between(*devices_of(pool)) == 2


@pytest.fixture
def local_pair() -> Iterator[tuple[Any, Any]]:
    """Devices of two pools on this machine."""
    with sky.Compute("local", ui="none") as one, sky.Compute("local", ui="none") as two:
        yield one.device("cpu"), two.device("cpu")


def copies_between(first: Any, second: Any) -> int:
    """How many copies go from host to host, of two that come after the first ones."""
    torch.ones(1, device=first).to(second)
    torch.ones(1, device=second).to(first)
    with sky.device.profile() as found:
        same(torch.arange(9, device=first).to(second), torch.arange(9))
        same(torch.arange(9, device=second).to(first), torch.arange(9))
    return found.copies


@pytest.mark.slow
def test_one_direction_is_enough(local_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that others cannot connect to sends and receives all the same."""
    from skyfab.device import tensors

    link = tensors.streams[local_pair[0].index].link
    monkeypatch.setattr(link, "addresses_for", lambda other: ["192.0.2.1"], raising=True)
    assert copies_between(*local_pair) == 2


@pytest.mark.slow
def test_without_cryptography_copies_come_through_here(
    local_pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert copies_between(*local_pair) == 0


# ---- strangers


def certificate() -> tuple[str, str]:
    made = new_certificate()
    assert made is not None
    return made


class Ends:
    """Both ends of a channel in this process."""

    def __init__(self) -> None:
        made = certificate()
        self.receiver, self.sender = Channel("a", *made), Channel("b", *made)
        (self.port,) = self.receiver.listen(["127.0.0.1"])

    def connect(self) -> bool:
        return self.sender.connect([("127.0.0.1", self.port)])

    def close(self) -> None:
        for end in (self.receiver, self.sender):
            end.close()
            if end._sender is not None:
                end._sender.join(10)
            if end._socket is not None:
                end._socket.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as made:
        yield made


def received(end: Channel, number: int, size: int) -> bytes:
    room = bytearray(size)
    end.receive(number, memoryview(room))
    return bytes(room)


def rubbish(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as stranger:
        stranger.sendall(os.urandom(1000))
        until(lambda: not heard(stranger))


def heard(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1000)
    except ConnectionError:
        return b""


def shake(port: int, context: ssl.SSLContext) -> None:
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        try:
            with context.wrap_socket(plain) as stranger:
                assert stranger.recv(1) == b"", "it sends nothing"
        except OSError:
            pass


def other_certificate(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with channel._file_of("".join(certificate())) as path:
        context.load_cert_chain(path)
    shake(port, context)


def no_certificate(port: int) -> None:
    shake(port, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def older_tls(port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    shake(port, context)


@pytest.mark.parametrize("stranger", [rubbish, other_certificate, no_certificate, older_tls])
def test_a_stranger_is_sent_away_and_disturbs_nothing(ends: Ends, stranger: Callable[[int], None]) -> None:
    with socket.create_connection(("127.0.0.1", ends.port)) as silent:
        stranger(ends.port)
        assert ends.connect()
        ends.sender.send(1, memoryview(b"tensor"))
        assert received(ends.receiver, 1, 6) == b"tensor"
        silent.settimeout(10)
        assert silent.recv(1) == b""
    with pytest.raises(OSError):
        until(lambda: socket.create_connection(("127.0.0.1", ends.port)).close())


def test_no_more_strangers_than_a_few(ends: Ends) -> None:
    connections = [socket.create_connection(("127.0.0.1", ends.port)) for _ in range(50)]
    connections[-1].settimeout(10)
    assert connections[-1].recv(1) == b""
    for connection in connections:
        connection.close()
    until(ends.connect)


def test_a_stranger_that_listens_learns_nothing() -> None:
    mine, theirs = Channel("a", *certificate()), Channel("b", *certificate())
    (port,) = theirs.listen(["127.0.0.1"])
    assert not mine.connect([("127.0.0.1", port)])
    theirs.close()
    assert theirs._socket is None


@pytest.mark.slow
def test_nothing_listens_and_no_key_is_left(
    linked: tuple[Any, Any], remote_pool: sky.Compute, device_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyfab.device import p2p_client

    made = certificate()
    key = made[1].splitlines()[1]

    def listening() -> list[int]:
        files = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        lines = [line.split() for text in files for line in text.splitlines()]
        return [int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"]

    p2p_client._channels.clear()
    first, second = linked
    with monkeypatch.context() as patched:
        patched.setattr(p2p_client, "new_certificate", lambda: made)
        same(torch.ones(3, device=first).to(second), torch.ones(3))
    folders = ["/tmp", "/root", "/home", "/run", "/dev/shm", "/var/tmp"]
    for device, host in zip(linked, remote_pool.hosts, strict=True):
        until(functools.partial(lambda device: set(sky.run_on(device, listening)) == {22}, device))
        found = device_lab[host.name].run(["grep", "-rslF", "--", key, *folders], check=False)
        assert (found.returncode, found.stdout) == (1, "")


@pytest.mark.parametrize(("number", "size"), [(0, 1 << 20), (1, 10)], ids=["more bytes", "another tensor"])
def test_a_hostile_sender_sends_what_was_not_asked_for(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, number: int, size: int
) -> None:
    class Wrong:
        unpack, size = staticmethod(channel._SENT.unpack), channel._SENT.size

        def pack(self, asked: int, *rest: Any) -> bytes:
            return original.pack(asked + number, *rest)

    original = channel._SENT
    monkeypatch.setattr(channel, "_SENT", Wrong())
    assert ends.connect()
    ends.sender.send(1, memoryview(bytes(size)))
    with pytest.raises(ChannelBroken, match="unexpected data"):
        received(ends.receiver, 1, 10)


# ---- what waits to be sent


def test_what_waits_to_be_sent_is_bounded(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_WAITING", 100)
    assert ends.connect()
    sent: list[int] = []

    def send() -> None:
        for number in range(1, 11):
            ends.sender.send(number, memoryview(bytes([number]) * 60))
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: sent == [1])
    ends.receiver.skip(3)
    until(lambda: sent == [1, 2, 3, 4])
    assert received(ends.receiver, 4, 60) == bytes([4]) * 60
    assert received(ends.receiver, 6, 60) == bytes([6]) * 60, "those between are not needed any more"
    ends.sender.close()
    thread.join(10)
    assert sent == [*range(1, 11)], "a broken channel delays no sender"
    with pytest.raises(ChannelBroken):
        received(ends.receiver, 8, 60)


def test_a_reason_in_place_of_a_tensor(ends: Ends) -> None:
    assert ends.connect()
    ends.sender.send(1, "x" * 10_000)
    with pytest.raises(NotSent, match="a did not send it: xxx"):
        received(ends.receiver, 1, 60)
    ends.sender.send(3, memoryview(b"three"))
    with pytest.raises(NotSent, match="it was never computed"):
        received(ends.receiver, 2, 60)
    assert received(ends.receiver, 3, 5) == b"three"
