"""The worker process: runs the user's functions, one call after another.

Its two pipes to the agent carry the same frames as the connection to the client. Everything that it writes to file
descriptors 1 and 2 goes to further pipes, which the agent reads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import os
import signal
import sys
import time
import types
from _thread import allocate_lock
from collections import deque

from skyfab import context
from skyfab.host.agent import cuda, workdir
from skyfab.host.agent.functions import GENERATORS, load_function
from skyfab.host.agent.imports import ImportFinder
from skyfab.host.agent.outcomes import cut, describe, exited, said, trace
from skyfab.host.agent.store import Blobs, NotStored
from skyfab.host.agent.worker_setup import set_up
from skyfab.protocol import codec, messages
from skyfab.protocol.batches import GROUP_BYTES, GROUP_PARTS, as_group, of_group
from skyfab.protocol.blobs import Assembly, names_blobs, split
from skyfab.protocol.frames import BYE, CHUNK, DATA, HEAD, Reader, data_header, frame, head_frame
from skyfab.protocol.mux import SMALL

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from skyfab.protocol.frames import Buffer


_COROUTINE = types.CoroutineType
_NO_ARGUMENTS = codec.dumps((None,)).data


def main(source: int, sink: int, request: dict[str, Any]) -> None:
    """Serves calls until the agent closes the pipe."""
    set_up(request)
    rank = Worker(source, sink, request["stores"], plain=request["plain"])
    cuda.limit_memory(request["env"].get(context.GPU_SHARE))
    if context.JOINED in request["env"]:
        from skyfab.host.agent.join import hand_over

        rank.unfit = hand_over(request, source, sink)
    if request["threads"] > 1:
        rank.use_threads(request["threads"])
    signal.signal(signal.SIGINT, rank.interrupted)
    context.hold_client(rank)
    sys.meta_path.insert(0, ImportFinder(functools.partial(rank.importing, request["worker"]), request["path"]))
    try:
        workdir.enter(*request["workdir"])
    except OSError as error:  # the first call raises it, and the next one gets a new process
        rank.unfit = workdir.unusable(request["workdir"][0], error)
    try:
        rank.serve()
    finally:
        rank.close()


def _at_once(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments)


class _NotEncoded(Exception):
    """The result of an item, of this type, cannot be pickled. The cause is why."""


class Worker(context.Client):
    """Receives functions and calls, and replies with results: pickled, or as plain data (`plain`)."""

    def __init__(self, source: int, sink: int, stores: list[str], *, plain: bool = False) -> None:
        self.source = source
        self._recv_into = io.FileIO(source, closefd=False).readinto
        self._sink = sink
        self._blob = Blobs(stores)
        self.plain = plain
        self.encoding: Any = codec
        if plain:
            from skyfab.protocol import plain_data

            self.encoding = plain_data
        self._reader = Reader(self)
        self._opening: dict[int, Assembly] = {}
        self._ready: deque[tuple[int, messages.Message, Assembly | list[memoryview]]] = deque()
        """Messages in the order in which they began. The data of some may still be missing."""
        self._asides: deque[tuple[int, messages.Exchange, Assembly | list[memoryview]]] = deque()
        """The same, for exchanges with a call that has begun."""
        self._calls: Callable[..., Any] = _at_once
        """Runs calls: one after another, or several at a time on threads."""
        self._in_function = False
        """User code runs on the main thread."""
        self._exchanges: Any = None
        """Of its calls with the client, once there are any."""
        self._sending = allocate_lock()
        """Held while a reply is sent: threads of an exchange reply too."""
        self._functions: dict[str, Any] = {}
        self._loading = allocate_lock()
        """Held while a function is loaded: several threads may need it at once."""
        self._hooks = contextlib.ExitStack()
        """Cleanup of the plugins, for a regular exit of this process."""
        self._entered = self._spoiled = False
        """`_entered`: the plugins are set up. `_spoiled`: something failed, and the process must not be used again."""
        self._elastic: Any = None
        """The plugin whose ranks run the functions, which are unpickled there only."""
        self._poisoned = False
        """CUDA is unusable: the plugins' cleanup would fail or hang."""
        self.unfit: Exception | None = None
        """Why no call can run in this process."""
        self._item: int | None = None
        """Which item a call for each of several has come to."""
        self._pid = os.getpid()
        self._fflush = ctypes.CDLL(None).fflush
        self._fflush.argtypes = [ctypes.c_void_p]

    def close(self) -> None:
        """Runs the plugins' cleanup and what functions left to `atexit`, and writes what open files still hold."""
        if self._poisoned:
            return
        try:
            self._hooks.close()
        except Exception:
            sys.stderr.write(trace(sys.exc_info()[1]))  # type: ignore[arg-type]
        context.flush_files()  # also before: what is called next may not return
        atexit._run_exitfuncs()  # writers of logs and metrics write there what they still hold
        context.flush_files()
        self.flush()

    def serve(self) -> None:
        while True:
            while self._ready and self._ready[0][0] not in self._opening:
                stream, message, found = self._ready.popleft()
                if isinstance(message, messages.Call):
                    self._calls(self._call, stream, message, found)
                elif isinstance(message, messages.Function):
                    self._functions[message.digest] = found
                elif isinstance(message, messages.Forget):
                    for digest in message.digests:
                        self._functions.pop(digest, None)
            if self._spoiled or not self._pump():
                return

    # ---- receiving

    def _pump(self) -> bool:
        """Receives more. False: the agent has closed the pipe."""
        if self._exchanges is None:
            return self.read()
        return bool(self._exchanges.read_until(lambda: self._ready and self._ready[0][0] not in self._opening))

    def read(self) -> bool:
        more = self._reader.pump(self._recv_into)
        while self._asides and self._asides[0][0] not in self._opening:
            stream, message, found = self._asides.popleft()
            buffers = found.buffers() if isinstance(found, Assembly) else found
            self._exchanges.take(stream, message, buffers)
        return more

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        if kind == HEAD:
            message = messages.decode(bytes(payload[:head] if head else payload))
            parts = getattr(message, "parts", ())
            queue: deque[Any] = self._ready
            if isinstance(message, messages.Exchange):
                queue = self._asides
                self._open_exchanges()
            elif isinstance(message, messages.Call) and message.streams:
                self._open_exchanges().open(stream, message.ask)
            if self._blob.kept and isinstance(message, messages.Call):
                self._blob.keep_only(parts)
            if head and not names_blobs(parts):
                queue.append((stream, message, split(parts, payload[head:])))
            else:
                assembly = Assembly(parts, resolve=self._blob)
                queue.append((stream, message, assembly))
                if head:
                    assembly.fill(payload[head:])
                elif assembly.missing:  # else it is a long head without data
                    self._opening[stream] = assembly
        elif kind == DATA and self._opening[stream].advance(len(payload)):
            del self._opening[stream]

    def _open_exchanges(self) -> Any:
        if self._exchanges is None:
            from skyfab.host.agent.exchanges import Exchanges

            self._exchanges = Exchanges(self)
        return self._exchanges

    def use_threads(self, count: int) -> None:
        """From now on, runs several calls at a time."""
        from concurrent.futures import ThreadPoolExecutor

        self._open_exchanges()
        self._calls = ThreadPoolExecutor(count).submit

    def interrupted(self, number: int, frame: Any) -> None:
        """Handles SIGINT, which the agent sends when the client closes a generator, possibly before that has begun."""
        if self._exchanges is not None and os.getpid() == self._pid:
            self._exchanges.interrupted()
        elif self._in_function:
            raise KeyboardInterrupt

    def argument(self, number: int) -> Any:
        return self._open_exchanges().argument(number)

    def ask(self, request: tuple[Any, ...]) -> Any:
        return self._open_exchanges().ask(request)

    def place(self, stream: int, length: int) -> memoryview:
        return self._opening[stream].place(length)

    # ---- calling

    def _call(self, stream: int, call: messages.Call, found: Assembly | list[memoryview]) -> None:
        try:
            function = self._function(call.function)
            buffers = found.buffers() if isinstance(found, Assembly) else found
        except NotStored as error:
            self.answer(stream, messages.Ended(why="unstored", text=str(error)).encode())
        except BaseException as error:
            self.flush()
            self._raised(stream, error)
        else:
            if call.each:
                function = functools.partial(self._each, function, of_group(buffers))
                buffers = [memoryview(_NO_ARGUMENTS)]
            elif self._elastic is not None:
                work = function, [*map(bytearray, buffers)]
                function = functools.partial(self._elastic.run_elastic_agent, context.instance_info(), work)
                buffers = [memoryview(_NO_ARGUMENTS)]
            self._perform(stream, function, buffers, same_gpus=call.same_gpus and not self.plain)

    def _each(self, function: Any, items: list[list[memoryview]]) -> codec.Payload:
        """Calls a function for every item, until the results are enough for a reply.

        Arguments are unpickled when their turn comes, and results pickled when they are returned: what one call changes
        is not visible to others.
        """
        began = time.perf_counter()
        dump = self.encoding.dumps if self.plain else codec.dumper()
        results = []
        size = parts = 0
        for self._item, (data, *more) in enumerate(items):
            result = context.awaited(function(*codec.loads(data, more)))
            try:
                payload = dump(result)
            except BaseException as error:
                raise _NotEncoded(type(result).__qualname__) from error
            results.append(payload.copied() if len(items) > 1 else payload)
            size, parts = size + payload.size, parts + len(payload.buffers)
            if size > GROUP_BYTES or parts > GROUP_PARTS:
                break  # the program sends the other items again
        self._item = None
        return as_group([self.encoding.dumps(time.perf_counter() - began), *results])

    def _perform(self, stream: int, function: Any, buffers: list[memoryview], *, same_gpus: bool) -> None:
        conversation = None
        try:
            if self._exchanges is not None:
                conversation = self._exchanges.enter(stream)
            *args, kwargs = codec.loads(buffers[0], buffers[1:])
            buffers.clear()  # so that only the arguments keep the memory alive
            self._in_function = True
            result = function(*args, **kwargs) if kwargs else function(*args)
            if type(result) is _COROUTINE:
                result = context.awaited(result)
            self._in_function = False
            del args, kwargs
            if conversation is not None and type(result) in GENERATORS:
                result = conversation.generate(context.iterated(result))
        except SystemExit as error:
            self._in_function = False
            self._item = None
            ended = exited(error)
            self.flush()
            self._end_child(ended.exitcode or 0)
            self.answer(stream, ended.encode())
            return
        except BaseException as error:
            self._in_function = False
            if os.getpid() != self._pid:
                sys.stderr.write(trace(error))
            self.flush()
            self._end_child(1)
            if conversation is not None and conversation.unpicklable:
                self._unpicklable(stream, "a value that it yielded", conversation.unpicklable, error)
            elif type(error) is _NotEncoded:  # it may refuse to be examined
                self._unpicklable(stream, "the result", str(error), error.__cause__ or error)
            else:
                self._raised(stream, error)
            return
        self.flush()
        try:
            encode = functools.partial(codec.dumps, same_gpus=True) if same_gpus else self.encoding.dumps
            payload = result if type(result) is codec.Payload else encode(result)
        except BaseException as error:  # also KeyboardInterrupt, which would end this process
            self._unpicklable(stream, "the result", type(result).__qualname__, error)
            return
        self.answer(stream, messages.Result.head(parts=payload.parts, plain=self.plain), payload)

    def _unpicklable(self, stream: int, what: str, kind: str, error: BaseException) -> None:
        self._examine(error)
        why, text = "unpicklable", f"{what}, a {kind}, cannot be pickled: {said(error) or type(error).__name__}"
        if self.plain:
            why, text = "not_plain", said(error)
        item, self._item = self._item, None
        self.answer(stream, messages.Ended(why=why, text=cut(text), traceback=cut(trace(error)), item=item).encode())

    def _function(self, digest: str) -> Any:
        if not isinstance(self._functions[digest], (Assembly, list)):
            return self._functions[digest]
        with self._loading:
            return self._load(digest)

    def _load(self, digest: str) -> Any:
        found = self._functions[digest]
        if isinstance(found, Assembly):
            try:
                found = found.buffers()
            except NotStored:
                self._spoil()  # so that the function is sent again, to a new process
                raise
        if isinstance(found, list):  # still pickled: this is its first call
            if self.unfit is not None:
                self._spoil()
                raise self.unfit
            load = codec.loader(found[0], found[1:])
            plugins = load()
            if "RANK" in os.environ:
                self._elastic = next((plugin for plugin in plugins if plugin.elastic), None)
            if self._elastic is not None:
                function = tuple(map(bytearray, found))
            else:
                self._enter(plugins)  # first: unpickling the function imports the user's modules
                function = load_function(load, plugins)
            context.close_listener()  # from now on the function can listen on that port
            found = self._functions[digest] = function
        return found

    def _enter(self, plugins: tuple[Any, ...]) -> None:
        """Enters the pool's plugins, once for the rest of this process."""
        if plugins and not self._entered:
            try:
                for plugin in plugins:
                    self._hooks.enter_context(plugin.around_process(context.instance_info()))
            except BaseException:
                self._spoil()
                raise
            self._entered = True

    def _spoil(self) -> None:
        """Makes this process exit after its next reply, and announces that to the agent with BYE."""
        self._spoiled = True
        with self._sending:
            self._send(frame(BYE))

    def _examine(self, error: BaseException) -> None:
        """If an error has left CUDA unusable, makes later calls run in a new process."""
        is_unusable = False
        with contextlib.suppress(Exception):  # the exception may refuse to be examined
            is_unusable = not self._spoiled and cuda.is_unusable(error)
        if is_unusable:
            self._poisoned = True
            text = "skyfab: CUDA no longer works in this process after that error: the next call gets a new process\n"
            with contextlib.suppress(Exception):  # user code may have closed stderr
                sys.stderr.write(text)
                self.flush()
            self._spoil()

    def _raised(self, stream: int, error: BaseException) -> None:
        self._examine(error)
        message, payload = describe(error, self.encoding, item=self._item, plain=self.plain, unfit=error is self.unfit)
        self._item = None
        self.answer(stream, message.encode(), payload)

    def flush(self) -> None:
        """Flushes stdout and stderr, C buffers included: a call's output must be written before its reply."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except Exception:
            pass  # user code may have closed or replaced them
        self._fflush(None)

    # ---- replying

    def importing(self, name: str, module: str) -> None:
        """Reports to the agent which package is imported; an empty string for none. Children of this process do not."""
        if os.getpid() == self._pid and not self._sending.locked():  # else another thread sends, and may take long
            send = self.send if self._exchanges is None else self._exchanges.send
            send(0, messages.Importing(worker=name, module=module).encode())

    def check_process(self) -> None:
        """Raises RuntimeError in a child that a function forked: it has the pipes of this process, but no replies."""
        if os.getpid() != self._pid:
            text = "a forked child cannot use the actors, streams and generators of its parent: use them in the parent"
            raise RuntimeError(text)

    def _end_child(self, code: int) -> None:
        """Exits if this is a child that the function forked and that returned from the function too."""
        if os.getpid() != self._pid:
            os._exit(code & 0xFF)

    def answer(self, stream: int, message: bytes, payload: codec.Payload | None = None) -> None:
        self._end_child(0)
        self.send(stream, message, payload)
        if self._exchanges is not None:  # after the reply: the client must not send more
            self._exchanges.end(stream)

    def send(self, stream: int, message: bytes, payload: codec.Payload | None = None) -> None:
        """Sends a message as a whole."""
        self.check_process()
        pieces: tuple[Buffer, ...] = () if payload is None else (payload.data, *payload.buffers)
        with self._sending:
            if sum(map(len, pieces)) <= SMALL and len(message) <= SMALL:
                self._send(head_frame(stream, message, pieces))
                return
            self._send(head_frame(stream, message))
            for piece in pieces:
                part = memoryview(piece)
                for at in range(0, len(part), CHUNK):
                    chunk = part[at : at + CHUNK]
                    self._send(data_header(stream, len(chunk)), chunk)

    def _send(self, *buffers: Buffer) -> None:
        pending = list(buffers)
        while pending:
            sent = os.writev(self._sink, pending)
            while pending and sent >= len(pending[0]):
                sent -= len(pending.pop(0))
            if pending:
                pending[0] = memoryview(pending[0])[sent:]
