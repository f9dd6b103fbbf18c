"""Stands in for packages that hosts do not have, such as pytest: put there under their names.

Hosts import test modules for the functions in them, and collect nothing.
"""

from __future__ import annotations

from typing import Any


class _Anything:
    """Takes whatever is done with it while a module is imported; a decorator leaves its function as it is."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and not options and hasattr(args[0], "__code__") else self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, key: Any) -> _Anything:
        return self

    def __or__(self, other: Any) -> _Anything:
        return self


def __getattr__(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
