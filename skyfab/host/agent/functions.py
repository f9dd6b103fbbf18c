"""Functions as a worker calls them: unpickled, inside the contexts of the plugins, with sources for tracebacks."""

from __future__ import annotations

import contextlib
import types

from skyfab import context

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

GENERATORS = (types.GeneratorType, types.AsyncGeneratorType)
"""What calls of generator functions return."""


def load_function(load: Callable[[], Any], plugins: Sequence[Any]) -> Any:
    """The function that follows the plugins in its pickle, with the plugins around each call if its pickle says so."""
    function, wrapped, sources, each = load()
    show_lines(sources)
    function = function.fn if wrapped else function
    if not plugins or not each:
        return function

    def inside(*args: Any, **kwargs: Any) -> Any:
        with around():
            return context.awaited(function(*args, **kwargs))

    def generating(*args: Any, **kwargs: Any) -> Any:
        with around():
            yield from context.iterated(function(*args, **kwargs))

    def around() -> contextlib.ExitStack:
        with contextlib.ExitStack() as entered:
            for plugin in plugins:
                entered.enter_context(plugin.around_call(context.instance_info()))
            return entered.pop_all()

    return generating if context.yields(function) else inside


def show_lines(sources: Mapping[str, str]) -> None:
    """Makes tracebacks show the lines of files that are not on this host."""
    for filename, text in sources.items():
        import linecache

        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
