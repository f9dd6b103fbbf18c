"""The worker process: runs the user's functions, one call after another.

Its two pipes to the agent carry the same frames as the connection to the client. Everything that it writes to file
descriptors 1 and 2 goes to further pipes, which the agent reads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import io
import os
import signal
import sys
import time
import types
from collections import deque

from skyfab import context
from skyfab.errors import HostUnfit
from skyfab.host.agent import cuda, workdir
from skyfab.host.agent.imports import ImportFinder
from skyfab.host.agent.store import map_blob
from skyfab.protocol import codec, messages
from skyfab.protocol.blobs import Assembly, split
from skyfab.protocol.frames import BYE, CHUNK, DATA, HEAD, Reader, data_header, frame, head_frame
from skyfab.protocol.mux import SMALL

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from skyfab.protocol.frames import Buffer


_TEXT = 16 * 1024
_COROUTINE = types.CoroutineType
_HERE = os.path.dirname(__file__)
_OURS = (__file__, os.path.join(_HERE, "actors.py"), os.path.join(os.path.dirname(_HERE), "device", ""))
"""Files whose frames come before the user's: this one, that of actors, and those of device workers."""


def main(source: int, sink: int, request: dict[str, Any]) -> None:
    """Serves calls until the agent closes the pipe."""
    _settle(request)
    rank = Worker(source, sink, request["stores"], plain=request["plain"])
    sys.meta_path.insert(0, ImportFinder(functools.partial(rank.importing, request["worker"]), request["path"]))
    try:
        workdir.enter(*request["workdir"])
    except OSError as error:  # the first call raises it, and the next one gets a new process
        rank.unfit = _no_workdir(request["workdir"][0], error)
    try:
        rank.serve()
    finally:
        rank.close()


def _settle(request: dict[str, Any]) -> None:
    """Sets this process up as if it had been started only for the user's code."""
    os.umask(int(os.environ.pop("SKYFAB_UMASK", "022"), 8))
    os.environ.update(request["env"])
    os.environ["SKYFAB_RANK"] = str(request["id"])  # inherited: tells the zygote which worker started a process
    sys.path[:0] = request["path"]
    sys.argv = [""]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.stdout = sys.__stdout__ = _text(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text(2)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.breakpointhook = _no_keyboard
    faulthandler.enable(sys.stderr)
    info = request["info"]
    context.hold_folder(os.getcwd())
    context.offer_stacks(request["worker"], info.get("rank", 0))
    context.hold_listener(request["listener"])
    context.enter(context.InstanceInfo(**{**info, "peers": tuple(info["peers"])}))


def _text(fd: int) -> Any:
    """A line-buffered text stream."""
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _no_keyboard(*args: Any, **kwargs: Any) -> Any:
    """Replaces `breakpoint()` in a worker, unless PYTHONBREAKPOINT names something other than pdb."""
    if os.environ.get("PYTHONBREAKPOINT", "") not in ("", "pdb.set_trace"):
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
    raise RuntimeError("breakpoint() in a rank: debuggers do not work, because this process has no keyboard input")


def _no_workdir(folder: str, error: OSError) -> Exception:
    name = f"the working folder {folder}" if folder else "the working folder"
    return HostUnfit(
        f"cannot use {name}: {error}",
        hint='choose another one (Compute(workdir="/path"), workdir = … in the inventory), or workdir="temp"',
    )


class Worker:
    """Receives functions and calls, and replies with results: pickled, or as plain data (`plain`)."""

    def __init__(self, source: int, sink: int, stores: list[str], *, plain: bool = False) -> None:
        self._recv_into = io.FileIO(source, closefd=False).readinto
        self._sink = sink
        self._stores = stores
        self._plain = plain
        self._codec: Any = codec
        if plain:
            from skyfab.protocol import plain_data

            self._codec = plain_data
        self._reader = Reader(self)
        self._opening: dict[int, Assembly] = {}
        self._ready: deque[tuple[int, messages.Message, Assembly | list[memoryview]]] = deque()
        """Messages in the order in which they began. The data of some may still be missing."""
        self._functions: dict[str, Any] = {}
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
            sys.stderr.write(_trace(sys.exc_info()[1]))  # type: ignore[arg-type]
        context.flush_files()  # also before: what is called next may not return
        atexit._run_exitfuncs()  # writers of logs and metrics write there what they still hold
        context.flush_files()
        self._flush()

    def serve(self) -> None:
        while True:
            while self._ready and self._ready[0][0] not in self._opening:
                stream, message, found = self._ready.popleft()
                buffers = found.buffers() if isinstance(found, Assembly) else found
                if isinstance(message, messages.Call):
                    self._call(stream, message, buffers)
                elif isinstance(message, messages.Function):
                    self._functions[message.digest] = buffers
                elif isinstance(message, messages.Forget):
                    for digest in message.digests:
                        self._functions.pop(digest, None)
            if self._spoiled or not self._reader.pump(self._recv_into):
                return

    # ---- receiving

    def arrived(self, kind: int, stream: int, payload: memoryview, head: int) -> None:
        if kind == HEAD:
            message = messages.decode(bytes(payload[:head] if head else payload))
            parts = getattr(message, "parts", ())
            if head:
                self._ready.append((stream, message, split(parts, payload[head:], self._blob)))
            else:
                assembly = Assembly(parts, resolve=self._blob)
                self._ready.append((stream, message, assembly))
                if assembly.missing:  # else it is a long head without data
                    self._opening[stream] = assembly
        elif kind == DATA and self._opening[stream].advance(len(payload)):
            del self._opening[stream]

    def _blob(self, name: str) -> memoryview:
        return map_blob(self._stores, name)

    def place(self, stream: int, length: int) -> memoryview:
        return self._opening[stream].place(length)

    # ---- calling

    def _call(self, stream: int, call: messages.Call, buffers: list[memoryview]) -> None:
        try:
            function = self._function(call.function)
        except BaseException as error:
            self._flush()
            self._raised(stream, error)
        else:
            if call.each:
                named = any(isinstance(part, list) for part in call.parts)
                again = functools.partial(self._again, call.parts, tuple(buffers)) if named else None
                function = functools.partial(self._each, function, again)
            elif self._elastic is not None:
                work = function, [*map(bytearray, buffers)]
                function = functools.partial(self._elastic.run_elastic_agent, context.instance_info(), work)
                buffers = [memoryview(codec.dumps((None,)).data)]
            self._perform(stream, function, buffers)

    def _again(self, parts: Sequence[messages.Part], buffers: Sequence[memoryview]) -> Any:
        """Unpickles the items of a call again, with unmodified blobs from the store."""
        data, *rest = [
            self._blob(part[0]) if isinstance(part, list) else buffer
            for part, buffer in zip(parts, buffers, strict=True)
        ]
        return codec.loads(data, rest)[0]

    def _each(
        self, function: Any, again: Callable[[], Any] | None, items: list[tuple[Any, ...]]
    ) -> tuple[float, list[Any]]:
        """Calls a function for every item. With `again`, each item is unpickled again, so that in-place changes by one
        call are not visible to the next."""
        began = time.perf_counter()
        if again is None:
            results = [context.awaited(function(*item)) for self._item, item in enumerate(items)]
        else:
            results = [
                context.awaited(function(*(again() if self._item else items)[self._item]))
                for self._item in range(len(items))
            ]
        self._item = None
        return time.perf_counter() - began, results

    def _perform(self, stream: int, function: Any, buffers: list[memoryview]) -> None:
        try:
            *args, kwargs = codec.loads(buffers[0], buffers[1:])
            buffers.clear()  # so that only the arguments keep the memory alive
            result = function(*args, **kwargs) if kwargs else function(*args)
            if type(result) is _COROUTINE:
                result = context.awaited(result)
            del args, kwargs
        except SystemExit as error:
            self._item = None
            ended = _exited(error)
            self._flush()
            self._end_child(ended.exitcode or 0)
            self._answer(stream, ended.encode())
            return
        except BaseException as error:
            if os.getpid() != self._pid:
                sys.stderr.write(_trace(error))
            self._flush()
            self._end_child(1)
            self._raised(stream, error)
            return
        self._flush()
        try:
            payload = result if type(result) is codec.Payload else self._codec.dumps(result)
        except Exception as error:
            self._examine(error)
            why, text = "unpicklable", f"the result, a {type(result).__qualname__}, cannot be pickled: {error}"
            if self._plain:
                why, text = "not_plain", str(error)
            self._answer(stream, messages.Ended(why=why, text=_cut(text), traceback=_cut(_trace(error))).encode())
            return
        self._answer(stream, messages.Result.head(parts=_sizes(payload), plain=self._plain), payload)

    def _function(self, digest: str) -> Any:
        found = self._functions[digest]
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
        self._send(frame(BYE))

    def _examine(self, error: BaseException) -> None:
        """If an error has left CUDA unusable, makes later calls run in a new process."""
        if not self._spoiled and cuda.is_unusable(error):
            self._poisoned = True
            text = "skyfab: CUDA no longer works in this process after that error: the next call gets a new process\n"
            with contextlib.suppress(Exception):  # user code may have closed stderr
                sys.stderr.write(text)
                self._flush()
            self._spoil()

    def _raised(self, stream: int, error: BaseException) -> None:
        self._examine(error)
        message, payload = describe(error, self._codec, item=self._item, plain=self._plain)
        self._item = None
        self._answer(stream, message.encode(), payload)

    def _flush(self) -> None:
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
        if os.getpid() == self._pid:
            self._send(head_frame(0, messages.Importing(worker=name, module=module).encode()))

    def _end_child(self, code: int) -> None:
        """Exits if this is a child that the function forked and that returned from the function too."""
        if os.getpid() != self._pid:
            os._exit(code & 0xFF)

    def _answer(self, stream: int, message: bytes, payload: codec.Payload | None = None) -> None:
        self._end_child(0)
        pieces: tuple[Buffer, ...] = () if payload is None else (payload.data, *payload.buffers)
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


def describe(error: BaseException, encoding: Any, **about: Any) -> tuple[messages.Raised, codec.Payload | None]:
    """The reply to a call that raised, and the encoded exception if it can be encoded."""
    text = _trace(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    try:
        said = str(error)
    except Exception:
        said = "<its str() failed>"
    payload = None
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            payload = encoding.dumps_exception(error)
    parts = _sizes(payload) if payload else ()
    return messages.Raised(parts=parts, kind=_cut(kind), text=_cut(said), traceback=_cut(text), **about), payload


def load_function(load: Callable[[], Any], plugins: Sequence[Any]) -> Any:
    """The function that follows the plugins in its pickle, with the plugins around each call, if it wants that."""
    function, wrapped, sources, each = load()
    show_lines(sources)
    function = function.fn if wrapped else function
    if not plugins or not each:
        return function

    def inside(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as around:
            for plugin in plugins:
                around.enter_context(plugin.around_call(context.instance_info()))
            return context.awaited(function(*args, **kwargs))

    return inside


def show_lines(sources: Mapping[str, str]) -> None:
    """Makes tracebacks show the lines of files that are not on this host."""
    for filename, text in sources.items():
        import linecache

        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)


def _sizes(payload: codec.Payload) -> tuple[messages.Part, ...]:
    return (len(payload.data), *map(len, payload.buffers))


def _exited(error: SystemExit) -> messages.Ended:
    """The reply to a call that called `sys.exit`, which ends the call and not the client's program."""
    code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    said = "" if error.code is None or isinstance(error.code, int) else f": {error.code}"
    return messages.Ended(why="exit", text=_cut(f"it called sys.exit({code}){said}"), exitcode=code)


def _cut(text: str) -> str:
    """Shortens a text to its beginning and end, because the head of a message is limited."""
    if len(text) <= 2 * _TEXT:
        return text
    return f"{text[:_TEXT]}\n[… {len(text) - 2 * _TEXT} characters …]\n{text[-_TEXT:]}"


def _trace(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    import traceback

    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename.startswith(_OURS):
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown))
