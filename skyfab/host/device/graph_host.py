"""Graphs of ``torch.compile`` in a device's worker: compiled here by Inductor, or executed as they are."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import linecache
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MethodType
from typing import Any, Final

import torch

_new_number: Final = itertools.count(1).__next__
_HINTS: Final = {
    "InvalidCxxCompiler": ": the host needs a C++ compiler, such as g++",
    "TritonMissing": ": the host's Python needs the package triton",
    "FailOnRecompileLimitHit": ": its sizes vary too much",
}
"""What is missing on a host, by the name of Inductor's error."""
_ENTER: Final = re.compile(r"    \w+ = torch\.amp\.autocast_mode\._enter_autocast\((.*)\)(;.*)?")
_EXIT: Final = re.compile(r"    .*torch\.amp\.autocast_mode\._exit_autocast\(.*")


class HostGraph(torch.nn.Module):  # type: ignore[misc]
    """A graph of the client. It is called as a module of `sky.remote`, and has no tensors of its own."""

    def __init__(
        self,
        graph: Part,
        device: str,
        written: Collection[int],
        on_cpu: Collection[int],
        is_dynamic: bool,
        options: Mapping[str, Any],
    ) -> None:
        """`on_cpu` are indices of inputs that are in the client's memory."""
        super().__init__()
        self.graph = graph
        self.device_here = torch.device(device)
        self.written = written
        """Indices of its tensors that it changes in place."""
        self.note = ""
        """Why it is not compiled; empty if it is."""
        self._on_cpu = on_cpu
        self._compiled: Callable[..., Any] | None = None
        self.options = dict(options)
        if self.options.pop("there") == "inductor":
            _compiled_at_once()
            dynamic = None if is_dynamic else False
            self._compiled = torch.compile(graph.function, fullgraph=True, dynamic=dynamic, options=self.options)

    def forward(self, *args: Any) -> Any:
        args = tuple(arg.cpu() if at in self._on_cpu else arg for at, arg in enumerate(args))
        if self._compiled is not None:
            try:
                with _scalars_in_graphs() if self.graph.has_scalars else contextlib.nullcontext():
                    return self._compiled(*args)
            except Exception as error:
                if not _is_of_compiler(error):
                    raise
                self._compiled = None  # nothing was executed: it can be executed as it is
                self.note = _explain(error)
        return self.graph(*args)


def _compiled_at_once() -> None:
    """Inductor compiles a backward with its forward: so one that it cannot compile is known before anything runs."""
    from torch._functorch import config

    if hasattr(config, "force_non_lazy_backward_lowering"):
        config.force_non_lazy_backward_lowering = True


def _scalars_in_graphs() -> Any:
    """``x.item()`` does not end a graph of Dynamo: the client's has found that it need not."""
    from torch._dynamo import config

    return config.patch(capture_scalar_outputs=True)


def _is_of_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, TorchDynamoException | InductorError | FailOnRecompileLimitHit)


def _explain(error: BaseException) -> str:
    inner, hint = error, ""
    while True:
        hint = hint or _HINTS.get(type(inner).__name__, "")
        cause = getattr(inner, "inner_exception", None) or inner.__cause__
        if cause is None:
            break
        inner = cause
    lines = [line for line in str(inner).splitlines() if line.strip()]
    text = f"{type(inner).__name__}: {lines[0].strip() if lines else ''}{hint}"
    return f"Inductor cannot compile a graph there, which is executed uncompiled: {text[:500]}"


class Part(torch.nn.Module):  # type: ignore[misc]
    """The code of a graph, and what it refers to: constants, and graphs within it."""

    def __init__(self, source: str, scope: Mapping[str, Any], attributes: Mapping[str, Any]) -> None:
        super().__init__()
        importlib.import_module("torch._inductor.inductor_prims")  # registers operators that a graph may have
        for name, value in attributes.items():
            setattr(self, name, value)
        found = dict(scope)
        source = _with_blocks(source)
        name = f"<graph {_new_number()} of torch.compile>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # else Dynamo wraps it
        exec(compile(source, name, "exec"), found)
        self.function = MethodType(found["forward"], self)
        """Its code is its own: Dynamo limits how often the same code is compiled."""
        self.has_scalars = ".item()" in source

    def forward(self, *args: Any) -> Sequence[Any]:
        return self.function(*args)  # type: ignore[no-any-return]


def _with_blocks(source: str) -> str:
    """Autocast in ``with`` blocks: torch 2.11 cannot compile code that enters and leaves it by calls, as graphs do."""
    lines, indentation = [], ""
    for line in source.splitlines(keepends=True):
        if entered := _ENTER.match(line):
            lines.append(f"{indentation}    with torch.autocast({entered[1]}):\n{indentation}        pass\n")
            indentation += "    "
        elif _EXIT.match(line):
            indentation = indentation[4:]
        else:
            lines.append(indentation + line)
    return "".join(lines)
