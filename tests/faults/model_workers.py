"""The threads of the model that use pools: each draws its operations from the seed, and has the model judge them."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import model_calls as calls
from model import BOUND, Kind, Model, Operation, Pool, Stop, is_all_but_noted

import skyfab as sky
from skyfab._util.signals import SignalCame

WEIGHTS = {
    "call": 20,
    "later": 20,
    "named": 8,
    "noted": 8,
    "retried": 4,
    "argument": 3,
    "result": 6,
    "array": 3,
    "failing": 4,
    "map": 4,
    "gather": 4,
    "broadcast": 8,
    "broadcast_later": 6,
    "cancel": 8,
    "cancel_broadcast": 2,
    "timeout": 3,
    "impatient": 3,
    "version": 6,
    "folder": 4,
    "contested": 6,
    "forward": 2,
    "detached": 2,
    "stopped": 1,
    "device": 5,
}
ON_MACHINES = ("noted", "folder", "contested", "forward")
"""Operations that need a host which is not this machine."""
WITH_TORCH = ("array", "device")
SEVERAL_STEPS = ("folder", "contested", "forward", "detached", "stopped")
"""Not for the main thread, whose operations are interrupted."""
MB = 1 << 20


class Worker:
    """One thread that makes calls: some it waits for immediately, others later."""

    def __init__(self, model: Model, name: str) -> None:
        self._model = model
        self._name = name
        self._number = 0
        self._random = model.random()
        self._open: list[Operation] = []
        self.doing: Operation | None = None
        """What it waits for."""
        pools = {kind: [pool for pool in model.pools if _can(pool, kind)] for kind in WEIGHTS}
        self._pools = {kind: found for kind, found in pools.items() if found and self._does(kind)}

    def _does(self, kind: str) -> bool:
        return True

    def run(self) -> None:
        kinds = list(self._pools)
        while not self._model.stop.is_set():
            self._number += 1
            self._random = self._model.random(self._name, self._number)
            (kind,) = self._random.choices(kinds, [WEIGHTS[kind] for kind in kinds])
            getattr(self, f"_{kind}")(self._random.choice(self._pools[kind]))
            while len(self._open) > self._random.randrange(12):
                self._finish(self._open.pop(self._random.randrange(len(self._open))))
        while self._open:
            self._finish(self._open.pop())

    # ---- calls

    def _call(self, pool: Pool) -> None:
        number = self._draw()
        self._now(self._operation("call", pool, 2 * number), lambda: calls.double(number) >> pool.compute)

    def _later(self, pool: Pool) -> None:
        number = self._draw()
        seconds = self._random.choice([0.0, 0.0, 0.001, 0.02, 0.2])
        self._submit(self._operation("later", pool, 2 * number), calls.nap(number, seconds))

    def _named(self, pool: Pool) -> None:
        number = self._draw()
        operation = self._operation("named", pool, 2 * number)
        operation.host = self._random.choice(pool.names)
        self._submit(operation, calls.double(number), on=operation.host)

    def _noted(self, pool: Pool) -> None:
        number = self._draw()
        self._model.noted[number] = False

        def right(found: Any) -> bool:
            self._model.noted[number] = True
            return bool(found == 2 * number)

        operation = self._operation("noted", pool, None)
        operation.right = right
        self._submit(operation, calls.note(f"{self._model.there}/notes", number))

    def _retried(self, pool: Pool) -> None:
        number = self._draw()
        self._submit(self._operation("retried", pool, 2 * number), calls.retried(number))

    def _argument(self, pool: Pool) -> None:
        content = self._random.randbytes(self._size())
        self._submit(self._operation("argument", pool, sha256(content).hexdigest()), calls.digest(content))

    def _result(self, pool: Pool) -> None:
        number, size = self._draw(), self._size()
        self._submit(self._operation("result", pool, calls.make.fn(number, size)), calls.make(number, size))

    def _array(self, pool: Pool) -> None:
        number, size = self._draw(), self._random.choice([0, 10, 5000, 400_000])
        expected: Any = calls.array.fn(number, size)
        operation = self._operation("array", pool, None)
        operation.right = lambda found: found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
        self._submit(operation, calls.array(number, size))

    def _failing(self, pool: Pool) -> None:
        operation = self._operation("failing", pool, None)
        operation.raises += (ArithmeticError,)
        operation.must_raise = True
        self._submit(operation, calls.fail(1), on=self._random.choice(["one", "all"]))

    def _map(self, pool: Pool) -> None:
        numbers = [self._draw() for _ in range(self._random.choice([1, 5, 60]))]
        operation = self._operation("map", pool, [2 * number for number in numbers])
        self._now(operation, lambda: pool.compute.map(calls.double, numbers))

    def _gather(self, pool: Pool) -> None:
        numbers = [self._draw() for _ in range(self._random.choice([2, 5]))]
        operation = self._operation("gather", pool, sorted(2 * number for number in numbers))
        group = sky.gather(
            *(calls.nap(number, self._random.choice([0.0, 0.01])) for number in numbers),
            stream=self._random.random() < 0.5,
            ordered=self._random.random() < 0.5,
        )
        self._now(operation, lambda: sorted(group >> pool.compute))

    def _broadcast(self, pool: Pool) -> None:
        operation, number = self._joining("broadcast", pool)
        self._now(operation, lambda: calls.join(number) @ pool.compute)

    def _broadcast_later(self, pool: Pool) -> None:
        operation, number = self._joining("broadcast later", pool)
        content = self._random.choice([b"", b"", b"", bytes(3_000_000)])
        self._submit(operation, calls.join(number, content, self._random.choice([0.0, 0.05])), on="all")

    def _cancel(self, pool: Pool) -> None:
        number = self._draw()
        operation = self._operation("cancelled call", pool, 2 * number)
        function = self._random.choice([calls.nap, calls.save_and_return])
        self._submit(operation, function(number, self._random.choice([0.0, 0.01, 0.3, 60])))
        self._give_up(operation)

    def _cancel_broadcast(self, pool: Pool) -> None:
        operation, number = self._joining("cancelled broadcast", pool)
        self._submit(operation, calls.join(number, b"", self._random.choice([0.0, 0.1, 60])), on="all")
        self._give_up(operation)

    def _timeout(self, pool: Pool) -> None:
        number = self._draw()
        function = self._random.choice([calls.limited_nap, calls.limited_save])
        on = self._random.choice(["one", "one", "one", "all"])
        expected = 2 * number if on == "one" else [2 * number] * self._world(pool)
        operation = self._operation("timeout", pool, expected)
        operation.raises += (sky.CallTimeout,)
        operation.must_raise = function is calls.limited_nap
        self._submit(operation, function(number, 60), on=on)

    def _impatient(self, pool: Pool) -> None:
        number = self._draw()
        operation = self._operation("impatient", pool, 2 * number)
        self._submit(operation, calls.nap(number, 0.1))
        if operation.future is not None:
            with contextlib.suppress(Exception, CancelledError):
                operation.future.result(0.01)

    def _version(self, pool: Pool) -> None:
        least = self._model.version

        def right(found: Any) -> bool:
            if type(found) is int and not least <= found <= self._model.written:
                self._model.report.broken("code", f"{operation} ran version {found}, and {least} was written before")
            return type(found) is int

        operation = self._operation("version", pool, None)
        operation.right = right
        self._now(operation, lambda: calls.version() >> pool.compute)

    # ---- files

    def _folder(self, pool: Pool) -> None:
        """There and back: what returns is compared, byte by byte."""
        operation = self._on_one_host("folder", pool)
        source, back = self._here("up"), self._here("back")
        count = self._random.choice([1, 3, 30])
        contents = {f"{n}/file": self._random.randbytes(self._size() // count) for n in range(count)}
        for name, content in contents.items():
            (source / name).parent.mkdir(parents=True)
            (source / name).write_bytes(content)
        to = f"sets/{source.name}"
        operation.right = lambda found: found == contents

        def work() -> dict[str, bytes]:
            pool.compute.upload(source, to=to, on=str(operation.host))
            pool.compute.download(to, to=back, on=str(operation.host))
            pool.compute.submit(calls.remove(to), on=str(operation.host)).result(BOUND)
            found = sorted(path for path in back.rglob("*") if path.is_file())
            return {str(path.relative_to(back / to)): path.read_bytes() for path in found}

        # Another pool, or a run, may have had the working folder when it was opened again: then it is a copy.
        operation.excused = {"lost": (sky.UsageError,), "died": (sky.HostUnfit,)}
        self._now(operation, work)
        for folder in (source, back):
            shutil.rmtree(folder, ignore_errors=True)

    def _contested(self, pool: Pool) -> None:
        """Several threads upload files of the same name, and replace them meanwhile: each arrives whole."""
        operation = self._on_one_host("contested", pool)
        content = self._random.randbytes(self._size())
        file = self._model.folder / f"contested{self._random.randrange(2)}"
        name = f"{operation.host} {file.name}"
        self._model.uploads(name, sha256(content).hexdigest())
        new = file.with_name(f"{file.name}.{self._name}")
        new.write_bytes(content)
        new.replace(file)

        def work() -> str:
            pool.compute.upload(file, to=f"shared/{file.name}", on=str(operation.host))
            return pool.compute.submit(calls.digest_of(f"shared/{file.name}"), on=str(operation.host)).result(BOUND)

        everything = [f"{host} {file.name}" for each in self._model.pools for host in each.names]
        operation.right = lambda found: any(found in self._model.contents.get(one, ()) for one in everything)
        away = (FileNotFoundError,)
        operation.excused = {"lost": away, "closed": away, "died": (sky.HostUnfit,)}
        self._now(operation, work)

    # ---- ports, runs, devices

    def _forward(self, pool: Pool) -> None:
        """Through a forwarded port to a function on the host, and back."""
        operation = self._on_one_host("forward", pool)
        content = self._random.randbytes(self._size())
        path = f"{self._model.there}/port{self._random.getrandbits(48)}"
        ended = (OSError,)
        operation.excused = {
            "cut": (sky.HostError, *ended),
            "lost": ended,
            "died": (sky.HostError, *ended),
            "full": ended,
            "closed": ended,
        }
        operation.right = lambda found: bool(found == (content, len(content)))

        def work() -> tuple[bytes, int]:
            host = str(operation.host)
            server = pool.compute.submit(calls.echo(path, 20), on=host)
            try:
                port = self._port(pool, host, path, server)
                with pool.compute.forward(port, on=host, local=0) as forward:
                    found = _through(forward.port, content)
                if not content.startswith(found):
                    return found, -1
                if len(found) < len(content):
                    raise ConnectionError(f"ended after {len(found)} of {len(content)} bytes")
                if (count := server.result(BOUND)) < 0:
                    raise ConnectionError("it has ended for the server")
                return found, count
            finally:
                server.cancel()

        self._now(operation, work)

    def _port(self, pool: Pool, host: str, path: str, server: Any) -> int:
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            with contextlib.suppress(OSError, sky.Unreachable, ValueError):
                return int(pool.machines[host].path(path).read_text())
            if server.done():
                server.result()
                raise ConnectionError("the server has ended")
            time.sleep(0.02)
        raise TimeoutError("the server does not start")

    def _detached(self, pool: Pool) -> None:
        """Its result and its lines, found again by its id."""
        operation, number = self._on_one_host("detached", pool), self._draw()
        lines, size = self._random.choice([0, 1, 300]), self._random.choice([0, 100, 2 * MB])
        seconds = self._random.choice([0.0, 1.0, 4.0]) if lines else 0.0
        expected = calls.speak.fn(number, 0, 0, size), [(0, "out", f"line {n} of {number}") for n in range(lines)]
        again = self._random.random() < 0.5

        def right(found: Any) -> bool:
            if "full" in self._model.excuses(operation):  # lines may be lost, and the log then says so
                lines = ([line[2] for line in some] for some in (found[1], expected[1]))
                return bool(found[0] == expected[0] and is_all_but_noted(*lines))
            return bool(found == expected)

        def work() -> tuple[object, list[tuple[int, str, str]]]:
            run = pool.compute.launch(calls.speak(number, lines, seconds, size), on=str(operation.host))
            if again:
                run = sky.attach(run.id, [host for host in pool.compute.selected if host.name == operation.host])
            found = run.result(BOUND)
            return found, [line for line in run.logs() if line[1] == "out"]

        operation.right = right
        operation.excused = _NEW_LOGIN
        self._now(operation, work)

    def _stopped(self, pool: Pool) -> None:
        operation, number = self._on_one_host("stopped", pool), self._draw()

        def work() -> object:
            run = pool.compute.launch(calls.nap(number, 30), on=str(operation.host))
            try:
                run.stop()
            except sky.HostError:
                self._stop_again(run)
                raise
            state = run.status
            try:
                return state, run.result(BOUND)
            except sky.SkyfabError as error:
                if isinstance(error, sky.HostError) or state == "failed":
                    raise
                return state, "stopped" in str(error)

        # With its host away, its state is not known; its result is waited for.
        operation.right = lambda found: (
            found[1]
            and (found[0] == "stopped" or (found[0] == "unreachable" and "cut" in self._model.excuses(operation)))
        )
        operation.excused = _NEW_LOGIN
        self._now(operation, work)

    def _stop_again(self, run: Any) -> None:
        """Nothing may be left at the end; a run would."""
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            with contextlib.suppress(sky.HostError):
                run.stop()
                return
            time.sleep(0.5)

    def _device(self, pool: Pool) -> None:
        import torch

        operation = self._on_one_host("device", pool)
        values = torch.randint(0, 1 << 30, (self._random.choice([4, 1000, 300_000]),), generator=_seeded(self._random))
        factor = self._random.randrange(1, 1000)
        expected = (values * factor + 1) % 1_000_003
        operation.right = lambda found: found[0].equal(expected) and found[1:] == (int(expected.sum()),) * 2

        def work() -> tuple[Any, int, int]:
            device = pool.compute.device("cpu", on=operation.host)
            there = (values.to(device) * factor + 1) % 1_000_003
            found = sky.fetch(there).result(BOUND)
            return found, int(there.sum()), calls.total(there) >> pool.compute

        self._now(operation, work)

    # ---- their beginning and their end

    def _draw(self) -> int:
        """A number that no other operation has."""
        return self._random.getrandbits(48)

    def _size(self) -> int:
        return self._random.choice([0, 1, 5000, 40_000, MB, 3 * MB]) + self._random.randrange(1000)

    def _here(self, what: str) -> Path:
        return self._model.folder / f"{what}-{self._name}-{self._number}"

    def _world(self, pool: Pool) -> int:
        return pool.compute.world_size

    def _operation(self, kind: str, pool: Pool, expected: Any) -> Operation:
        label = f"{self._name} {self._number}"
        return Operation(kind=kind, pool=pool, right=lambda found: bool(found == expected), label=label)

    def _on_one_host(self, kind: str, pool: Pool) -> Operation:
        operation = self._operation(kind, pool, None)
        operation.host = self._random.choice(pool.names)
        return operation

    def _joining(self, kind: str, pool: Pool) -> tuple[Operation, int]:
        number = self._draw()

        def right(found: Any) -> bool:
            well = [part[:2] for part in found] == [(2 * number, rank) for rank in range(len(found))]
            if well:
                self._model.joined(pool, found)
            return well

        operation = self._operation(kind, pool, None)
        operation.right = right
        return operation, number

    @contextlib.contextmanager
    def _busy(self, operation: Operation) -> Iterator[None]:
        self.doing = operation
        try:
            yield
        finally:
            self.doing = None

    def _attempt(self, work: Callable[[], Any]) -> Any:
        return work()

    def _is_patient(self) -> bool:
        return True

    def _now(self, operation: Operation, work: Callable[[], Any]) -> None:
        with self._busy(operation):
            try:
                found = self._attempt(work)
            except Exception as error:
                self._model.judge(operation, None, error)
            else:
                self._model.judge(operation, found, None)

    def _submit(self, operation: Operation, call: Any, on: str = "one") -> None:
        def ended(_: object) -> None:
            operation.end = time.monotonic()

        with self._busy(operation):
            try:
                operation.future = self._attempt(lambda: operation.pool.compute.submit(call, on=on))
            except Exception as error:
                self._model.judge(operation, None, error)
            else:
                operation.future.add_done_callback(ended)
                self._open.append(operation)

    def _give_up(self, operation: Operation) -> None:
        if operation.future is None:
            return
        operation.raises += (CancelledError,)
        time.sleep(self._random.choice([0.0, 0.0, 0.002, 0.05, 0.3]))
        for _ in range(self._random.choice([1, 1, 2])):
            try:
                if operation.future.cancel() and not operation.future.cancelled():
                    self._model.report.broken("cancel", f"{operation} was cancelled, and is not")
            except Exception as error:
                self._model.report.broken("cancel", f"{operation}.cancel() raised {error!r}")

    def _finish(self, operation: Operation) -> None:
        future = operation.future
        assert future is not None
        with self._busy(operation):
            try:
                error = self._attempt(lambda: future.exception(BOUND))
            except CancelledError as cancelled:
                error = cancelled
            except Stop:  # it is still on its way
                self._open += [operation] if self._is_patient() else []
                return
            except TimeoutError:
                self._model.late(operation, BOUND)
                return
        self._model.judge(operation, None if error else future.result(), error)


class Interrupted(Worker):
    """The main thread: signals come at any moment, whose handler returns, makes a call, or raises Stop."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, "main")
        self._chance = model.random("signals")
        self._may_raise = self._gave_up = False
        self.is_running = True
        self.count = 0

    def _does(self, kind: str) -> bool:
        return kind not in SEVERAL_STEPS

    def run(self) -> None:
        before = signal.signal(signal.SIGALRM, self._handle)
        timer = signal.setitimer(signal.ITIMER_REAL, 0.1)
        hook = sys.unraisablehook

        def drop(about: Any) -> None:
            """Python drops what a handler raises while the garbage collector calls something.

            A file that was just opened when a handler raised, before its ``with``, is closed by the garbage collector.
            """
            if not isinstance(about.exc_value, (Stop, SignalCame, ResourceWarning)):
                hook(about)

        sys.unraisablehook = drop
        try:
            with contextlib.suppress(Stop):  # where nothing ends
                super().run()
        finally:
            self.is_running = False
            sys.unraisablehook = hook
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, *timer)  # the time limit of a test is a timer as well

    def give_up(self) -> None:
        """From another thread: what the main thread waits for does not end."""
        self._gave_up = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    def _is_patient(self) -> bool:
        return not self._gave_up

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(0.001, 0.3))
        if self._gave_up:
            raise Stop
        kind = self._chance.choice(["raises", "returns", "returns", "calls"])
        if not self._may_raise or kind == "returns":
            return
        self._may_raise = False
        if kind == "raises":
            raise Stop
        self._call_of_handler(self._chance.choice(self._pools["call"]))
        self._may_raise = True

    def _call_of_handler(self, pool: Pool) -> None:
        operation = Worker._operation(self, "call of a handler", pool, 42)
        try:
            found = calls.double(21) >> pool.compute
        except Exception as error:
            self._model.judge(operation, None, error)
        else:
            self._model.judge(operation, found, None)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        try:
            self._may_raise = True
            return work()
        finally:
            self._may_raise = False

    def _operation(self, kind: str, pool: Pool, expected: Any) -> Operation:
        operation = super()._operation(kind, pool, expected)
        operation.raises = (Stop,)
        return operation


_NEW_LOGIN: dict[Kind, tuple[type[BaseException], ...]] = {
    "cut": (sky.HostError,),
    "full": (sky.SkyfabError,),  # a run fails whose result does not fit
}


def _can(pool: Pool, kind: str) -> bool:
    if kind in ON_MACHINES and not pool.machines:
        return False
    return pool.has_torch or kind not in WITH_TORCH


def _seeded(chance: random.Random) -> Any:
    import torch

    return torch.Generator().manual_seed(chance.getrandbits(32))


def _through(port: int, content: bytes) -> bytes:
    """Sends something through a port, and returns what comes back."""
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.settimeout(60)

        def send() -> None:
            with contextlib.suppress(OSError):  # the other direction says so too
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        found = bytearray()
        try:
            while data := connection.recv(65536):
                found += data
        finally:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            sender.join()
        return bytes(found)
