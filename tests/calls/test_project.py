"""The project, asked by several threads at once while its folders change."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from stage.threads import begin

import skyfab as sky
from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls import project
from skyfab.calls.modules import Modules, names_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "jobs"
    made.mkdir()
    (made / "one.py").write_text("value = 1\n")
    return made


def test_names_in_imports_are_found_between_comments() -> None:
    line = "#" * 70
    text = f"from foo import (\n    a,  # one # two\n    {line}\n    b as c,\n)\n"
    assert names_in(text, ()) == {"foo", "foo.a", "foo.b"}
    assert names_in(f"from foo import (\n    a,\n    {line}\n)\n", ()) == {"foo", "foo.a"}
    assert names_in("from foo import (a,  # see f()\n    b)\n", ()) == {"foo", "foo.a", "foo.b"}


def test_calls_from_several_threads_see_no_error_while_folders_come_and_go(folder: Path) -> None:
    found = project.Project(sky.Image(includes=[str(folder)]))
    over = threading.Event()

    def ask() -> int:
        asked = 0
        while not over.is_set():
            assert found.tree().files
            asked += 1
        return asked

    asking = [begin(ask) for _ in range(6)]
    end = time.monotonic() + 1.5
    number = 0
    while time.monotonic() < end and not any(future.done() for future in asking):
        number += 1
        new = folder / f"part{number % 3}"
        if new.exists():
            shutil.rmtree(new)
        else:
            new.mkdir()
            (new / "__init__.py").touch()
        if number % 20 == 0:
            found.close()  # as when a pool is closed while another thread makes a call
    over.set()
    assert all(future.result(10) for future in asking)
    found.close()


def test_a_signal_while_files_are_read_holds_up_no_other_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may make a call, which may have to wait for a call of another thread."""
    found, read = project.Project(sky.Image(includes=[str(folder)])), Modules
    seen = list[project.Tree]()

    def handle(*_: object) -> None:
        seen.append(begin(found.tree).result(30))
        raise InterruptedError

    def read_interrupted(*arguments: Any) -> Modules:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        return read(*arguments)

    monkeypatch.setattr(project, "Modules", read_interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    SIGNAL_GUARD.watch()
    try:
        with pytest.raises(InterruptedError):
            found.tree()
    finally:
        signal.signal(signal.SIGUSR1, before)
        SIGNAL_GUARD.leave()
        found.close()
    assert seen[0].files


def test_what_was_written_before_a_call_counts_for_every_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread has noticed the change and reads the folders; another one that asks meanwhile gets the new tree."""
    found = project.Project(sky.Image(includes=[str(folder)]))
    before = found.tree()
    found.tree()  # the second look watches every folder
    scanning, go = threading.Event(), threading.Event()
    scan = found._scan

    def slow() -> None:
        scanning.set()
        go.wait(10)
        scan()

    monkeypatch.setattr(found, "_scan", slow)
    (folder / "one.py").write_text("value = 22\n")
    first = begin(found.tree)
    assert scanning.wait(10)
    second = begin(found.tree)
    time.sleep(0.05)
    go.set()
    trees = [first.result(10), second.result(10)]
    assert all(tree.digest != before.digest for tree in trees)
    found.close()


def test_a_pool_that_is_opened_again_sees_what_was_written_meanwhile(folder: Path) -> None:
    """Also where no module of this program imports the file."""
    found = project.Project(sky.Image(includes=[str(folder)]))
    before = found.tree()
    found._next_scan = time.monotonic() + 1000  # as after a scan that took long
    found.close()
    (folder / "one.py").write_text("value = 333\n")
    after = found.tree()
    assert after.digest != before.digest
    (folder / "one.py").write_text("value = 4444\n")
    assert found.tree().digest not in (before.digest, after.digest), "and it is watched again"
    found.close()


def test_a_file_that_changes_before_it_is_sent_is_sent_as_it_was_read_again(folder: Path) -> None:
    """A program that writes to its log faster than hosts reply would never send it."""
    log = folder / "app.log"
    log.write_text("1")
    found = project.Project(sky.Image(includes=[str(folder)]))

    def content_after_a_change(tree: project.Tree) -> bytes | None:
        names = {inner.partition("/")[2]: name for inner, name in tree.files}
        log.write_text(log.read_text() + "1")
        return tree.content(names["app.log"])

    assert content_after_a_change(found.tree()) is None
    for content in (b"11", b"111"):
        assert content_after_a_change(found.tree(anew=True)) == content
    found.close()


def test_includes_keep_what_may_be_executed_and_have_the_files_that_links_lead_to(folder: Path) -> None:
    (folder / "v2").mkdir()
    (folder / "v2" / "run.sh").write_text("#!/bin/sh")
    found = project.Project(sky.Image(includes=[str(folder)]))
    before = {inner.partition("/")[2]: executable for inner, _, *executable in found.tree().files}
    assert {"one.py": [], "v2/run.sh": []}.items() <= before.items()
    (folder / "v2" / "run.sh").chmod(0o755)
    (folder / "now").symlink_to("v2")
    (folder / "v2" / "up").symlink_to("..")
    files = {inner.partition("/")[2]: executable for inner, _, *executable in found.tree(anew=True).files}
    assert {"one.py": [], "v2/run.sh": ["x"], "now/run.sh": ["x"]}.items() <= files.items()
    found.close()


def test_the_packages_of_a_project_are_found_though_they_are_not_installed(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "jobs/train.py", "src/own_app/__init__.py", "src/unused_app/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import own_app\n" if name == "jobs/train.py" else "")
    found = project.Project(sky.Image(program=str(tmp_path / "jobs" / "train.py")))
    names = {name.partition("/")[2] for name, _ in found.tree().files}
    found.close()
    assert {"train.py", "own_app/__init__.py"} <= names
    assert "unused_app/__init__.py" not in names


def test_modules_that_only_an_import_finder_knows_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of an editable install with setuptools."""
    for name in ("lib/found_app/__init__.py", "lib/found_app/inner.py", "lib/other_app.py", "jobs/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import found_app, other_app\n" if name == "jobs/train.py" else "")

    spec = spec_from_file_location("found_app", tmp_path / "lib" / "found_app" / "__init__.py")
    assert spec is not None

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec if name == "found_app" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    found = project.Project(sky.Image(program=str(tmp_path / "jobs" / "train.py")))
    names = {name.partition("/")[2] for name, _ in found.tree().files}
    found.close()
    assert {"train.py", "found_app/__init__.py", "found_app/inner.py"} <= names
    assert "other_app.py" not in names, "Python does not find it either"


def test_a_host_cannot_have_files_of_other_hosts_or_of_its_system_named_as_files_here() -> None:
    for there in ("", "/", "/usr", "usr/lib", "//"):
        project.note_laid_out("hostile", there, "/home/me/proj")
    project.note_laid_out("hostile", "/srv/proj", "/home/me/proj")
    for host, file, shown in (
        ("hostile", "/usr/lib/python3/x.py", "/usr/lib/python3/x.py"),
        ("hostile", "/srv/proj/x.py", "/home/me/proj/x.py"),
        ("node1", "/srv/proj/x.py", "/srv/proj/x.py"),
    ):
        assert project.with_local_paths(f'  File "{file}", line 1', host) == f'  File "{shown}", line 1'
