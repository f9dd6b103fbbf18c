"""Reports which package a worker is importing. Some take many seconds, as torch does from a cold disk.

Only the outermost import of a package that is neither in the standard library nor the project's own is reported: at
most a few in the life of a worker. The client decides after how many seconds it is shown.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from importlib.machinery import SourceFileLoader

TYPE_CHECKING = False  # importing `typing` would slow the start of an agent
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class ImportFinder:
    """The first finder in `sys.meta_path`: finds what the others do, and reports imports of packages."""

    def __init__(self, report: Callable[[str], None], own: Sequence[str]) -> None:
        """`report` is called with the name of a package whose import begins, and with an empty string at its end.

        `own` are the project's folders.
        """
        self._report = report
        self._own = tuple(own)
        self._thread = get_ident()
        self._inside = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self._inside or "." in name or name in sys.stdlib_module_names or get_ident() != self._thread:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        """Reports the import, if it is that of a package that is not the project's."""
        loader = spec.loader
        if type(loader) is not SourceFileLoader or not spec.submodule_search_locations:
            return
        if self._own and loader.path.startswith(self._own):
            return

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            self._inside = True
            self._report(spec.name)
            try:
                loader.exec_module(module)
            finally:
                self._inside = False
                self._report("")

        loader.exec_module = exec_module  # type: ignore[method-assign]
