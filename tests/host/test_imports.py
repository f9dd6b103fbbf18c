"""What a worker reports of its imports: packages that are neither Python's own nor the project's, and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.host.agent.imports import ImportFinder
from skyfab.ui.events import Event, Importing


class Reported:
    """A finder at work; what it reported, and the packages that it may find."""

    def __init__(self, folder: Path) -> None:
        self.names: list[str] = []
        self.folder = folder
        self.own = folder / "project"
        self.finder = ImportFinder(self.names.append, [str(self.own)])

    def package(self, name: str, code: str = "", *, own: bool = False) -> None:
        where = (self.own if own else self.folder) / name
        where.mkdir(parents=True)
        (where / "__init__.py").write_text(code)


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reported]:
    reported = Reported(tmp_path)
    monkeypatch.setattr(sys, "path", [str(reported.own), str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [reported.finder, *sys.meta_path])
    before = set(sys.modules)
    yield reported
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_outermost_package_is_told_and_its_end(reported: Reported) -> None:
    reported.package("outer_one", "import inner_one, outer_one.part")
    reported.package("inner_one")
    (reported.folder / "outer_one" / "part.py").write_text("import json")
    module = __import__("outer_one")
    assert reported.names == ["outer_one", ""]
    assert "exec_module" not in vars(module.__spec__.loader), "nothing is left in it"
    __import__("outer_one")
    assert reported.names == ["outer_one", ""], "it is imported once"


def test_the_project_and_single_modules_are_not_told_but_what_they_import_is(reported: Reported) -> None:
    reported.package("own_one", "import single_one", own=True)
    (reported.folder / "single_one.py").write_text("import heavy_one, sqlite3")
    reported.package("heavy_one")
    __import__("own_one")
    assert reported.names == ["heavy_one", ""]


@sky.function
def nothing() -> None: ...


@sky.function
def import_a_package(name: str) -> None:
    """It forks while it is imported, and the child imports another one."""
    name = f"{name}{sky.instance_info().rank}"
    for package, code in ((f"{name}_child", ""), (name, f"import os\nif not os.fork():\n    import {name}_child")):
        Path(package).mkdir()
        Path(package, "__init__.py").write_text(code)
    sys.path.append(str(Path.cwd()))
    pid = os.getpid()
    __import__(name)
    if os.getpid() != pid:
        os._exit(0)
    os.wait()


def test_a_pool_is_told_with_host_and_rank() -> None:
    """What a child of the process imports is not."""
    with sky.Compute("local", ranks=2, workdir="temp", ui="none") as compute:
        found: list[tuple[str, int | None, str]] = []

        def take(event: Event) -> None:
            if isinstance(event, Importing):
                found.append((event.host, event.rank, event.module))

        nothing() >> compute  # imports what this module does
        nothing() @ compute
        compute.events.subscribe(take)
        import_a_package("solo") >> compute
        assert found == [("local", None, "solo0"), ("local", None, "")]
        found.clear()
        import_a_package("gang") @ compute
        assert sorted(found) == [("local", 0, ""), ("local", 0, "gang0"), ("local", 1, ""), ("local", 1, "gang1")]
