"""bundle: skyfab as hosts get it, run where there is nothing but an interpreter."""

from __future__ import annotations

import ast
import io
import json
import os
import subprocess
import sys
import venv
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyfab.session.bundle import bundle, without_prose

LIBRARIES = {"fabric", "paramiko", "invoke", "rich", "pathspec", "numpy", "torch", "uv", "exceptiongroup"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's folder on a host."""
    folder = tmp_path_factory.mktemp("a host's cache") / bundle().digest
    for name, content in entries(bundle().archive):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def entries(archive: bytes) -> Iterator[tuple[str, bytes]]:
    file = io.BytesIO(zlib.decompress(archive))
    for line in iter(file.readline, b""):
        size, name = line.decode().split()
        yield name, file.read(int(size))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the standard library and nothing else: no pip, no site-packages."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def interpreters() -> dict[str, Path]:
    """Every Python from 3.10 on that this machine has and that starts, by its version."""
    places = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    shims = [place for place in places if place.name == "shims"]  # pyenv's: they may not start
    places += [path for place in shims for path in place.parent.glob("versions/*/bin")]
    found: dict[str, Path] = {}
    for minor in range(10, 20):
        for path in (folder / f"python3.{minor}" for folder in places):
            if path.is_file() and subprocess.run([str(path), "-I", "-c", ""], capture_output=True).returncode == 0:
                found.setdefault(f"3.{minor}", path)
    return found


INTERPRETERS = interpreters()


def run(bare: Path, unpacked: Path, code: str, *options: str) -> Any:
    """Runs code on the bare interpreter, isolated, with only the bundle to import; returns the JSON it prints."""
    code = f"import sys\nsys.path.insert(0, {str(unpacked)!r})\n{code}"
    done = subprocess.run(
        [str(bare), "-I", *options, "-c", code],
        capture_output=True,
        text=True,
        env={},
        cwd="/",
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_module_of_the_host_side_can_be_imported_there(bare: Path, unpacked: Path) -> None:
    """Also those that are imported only when they are needed."""
    names = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__")
        for package in ("host", "protocol")
        for path in sorted((unpacked / "skyfab" / package).rglob("*.py"))
        if "device" not in path.parts  # it imports torch
    ]
    assert len(names) > 10
    assert (
        run(
            bare,
            unpacked,
            f"import importlib, json\nprint(json.dumps([importlib.import_module(n).__name__ for n in {names!r}]))",
        )
        == names
    )


@pytest.mark.parametrize("python", INTERPRETERS.values(), ids=INTERPRETERS)
def test_every_python_from_3_10_on_can_be_a_host(python: Path, unpacked: Path) -> None:
    """Without site-packages: the agent's modules load, messages and functions travel, errors can be made."""
    code = """
import json
import skyfab.host.agent.link, skyfab.host.agent.agent, skyfab.host.agent.worker
from skyfab.protocol import codec, messages
import skyfab as sky
call = messages.decode(messages.Call(worker="0", function="f", parts=[3]).encode())
three = codec.loads(codec.dumps(lambda n=3: n).data)()
error = codec.loads(codec.dumps(sky.HostLost("gone", host="node1")).data)
image = sky.Image(pip=["numpy"])
print(json.dumps([call.parts, three, str(error), list(image.pip), sky.function(len).fn("abc")]))
"""
    assert run(python, unpacked, code, "-S") == [[3], 3, "node1: gone", ["numpy"], 3]


def test_every_public_name_loads_there(bare: Path, unpacked: Path) -> None:
    """Users' modules import them at their top, and a host imports those modules."""
    code = """
import importlib, json
import skyfab
from skyfab import *
names = [*skyfab.__all__, "lab", "plugins"]
run = importlib.import_module("skyfab.calls.script").perform
print(json.dumps([name for name in names if getattr(skyfab, name, None) is None]))
"""
    assert run(bare, unpacked, code) == []


def test_the_link_imports_little(bare: Path, unpacked: Path) -> None:
    """It stands between a person and the first result: none of the client's libraries, and none of the client."""
    code = """
import json
before = set(sys.modules)
import skyfab.host.agent.link
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = run(bare, unpacked, code, "-S")
    assert not [name for name in loaded if name.partition(".")[0] in LIBRARIES]
    ours = [name for name in loaded if name.startswith("skyfab")]
    assert set(ours) <= {"skyfab", "skyfab.host", "skyfab.host.agent", "skyfab.host.agent.link", "skyfab.protocol"}
    slow = {
        "typing",
        "dataclasses",
        "inspect",
        "asyncio",
        "hashlib",
        "ssl",
        "subprocess",
        "logging",
        "pathlib",
        "tempfile",
    }
    assert not slow & set(loaded)


@pytest.mark.parametrize("module", ["skyfab.host.agent.link", "skyfab.host.agent.agent", "skyfab.host.agent.worker"])
def test_the_host_side_pulls_none_of_the_client_even_where_that_is_installed(module: str) -> None:
    """In this very environment, which has fabric, rich, invoke and paramiko."""
    code = f"import sys, json, {module}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    allowed = {"exceptiongroup"} if sys.version_info < (3, 11) else set[str]()
    assert not [name for name in loaded if name.partition(".")[0] in LIBRARIES - allowed]
    client = {
        "skyfab.session.session",
        "skyfab.pool.compute",
        "skyfab.inventory.inventory",
        "skyfab.ssh",
        "skyfab.ui.screen",
        "skyfab.session.bootstrap",
    }
    assert not client & set(loaded)


# ---- the archive


def test_the_bundle_is_the_same_every_time() -> None:
    """Two programs with the same skyfab share what is on a host: same digest, same bytes."""
    code = (
        "import hashlib\n"
        "from skyfab.session.bundle import bundle\n"
        "print(bundle().digest, hashlib.sha256(bundle().archive).hexdigest())\n"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed, folder in (("1", "/"), ("2", "/tmp"))
    }
    assert len(shown) == 1
    first, second = bundle.__wrapped__(), bundle.__wrapped__()
    assert first.digest == second.digest
    assert first.archive == second.archive


def test_another_file_makes_another_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content, its name, and where one ends and the next begins: all of that is in the digest."""
    digests = set()
    for files in (), (("a", b"1"),), (("a", b"2"),), (("b", b"1"),), (("a", b"1"), ("b", b"1")), (("a", b"1b1"),):
        monkeypatch.setattr("skyfab.session.bundle._files", lambda files=files: iter(files))
        digests.add(bundle.__wrapped__().digest)
    assert len(digests) == 6


def test_the_bundle_is_small() -> None:
    """It is sent to every new host before anything else. Programs that use no lab send none."""
    code = """
from skyfab.session.bundle import bundle
print(len(bundle().archive), *(path for path, _ in bundle().files))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) < 450_000
    assert not [path for path in said[1:] if path.startswith("skyfab/lab/")]
    assert "skyfab/lab/lab.py" in dict(bundle().files), "this one uses it"


SOURCES = [file for file in bundle().files if file[0].endswith(".py")]


def statements(source: bytes) -> tuple[str, list[int]]:
    """What is executed, and in which lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree), [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def test_without_docstrings_and_comments_the_code_is_the_same() -> None:
    """Of some files: hosts run all of them."""
    for path, source in SOURCES[::8]:
        assert statements(without_prose(source)) == statements(source), path


def test_docstrings_and_comments_are_not_sent() -> None:
    source = (
        '"""Doc."""\n# one\nTEXT = """\n# kept\n"""\ndef f():\n    """Two\n    lines."""\n    # two\n    return "#"\n'
    )
    sent = '""""""\n\nTEXT = """\n# kept\n"""\ndef f():\n    """\n"""\n\n    return "#"\n'
    assert without_prose(source.encode()).decode() == sent
