"""bundle: skyfab as hosts get it, run where there is nothing but an interpreter."""

from __future__ import annotations

import ast
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skyfab._util.scripts import read
from skyfab.errors import ProtocolError
from skyfab.host.agent import library
from skyfab.protocol import LIBRARY_NAMES, messages
from skyfab.protocol.blobs import name_of
from skyfab.session.bundle import Bundle, bundle, without_prose

LIBRARIES = {"fabric", "paramiko", "invoke", "rich", "pathspec", "numpy", "torch", "uv", "exceptiongroup"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's folder on a host that has its library too."""
    folder = lay_out(tmp_path_factory.mktemp("a host's cache"))
    (folder / library.ARCHIVE).write_bytes(bundle().library)
    library.unpack(str(folder))
    return folder


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """The bundle's folder before the library has arrived."""
    return lay_out(tmp_path)


def lay_out(cache: Path) -> Path:
    """Unpacks the core, as a host does."""
    folder = cache / bundle().digest
    with tarfile.open(fileobj=io.BytesIO(bundle().archive)) as tar:
        for entry in tar:
            path = folder / entry.name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(entry)
            assert content is not None
            path.write_bytes(content.read())
    return folder


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


def test_the_bare_interpreter_is_bare(bare: Path, unpacked: Path) -> None:
    """Else the tests below prove nothing."""
    code = """
import importlib.util, json
print(json.dumps([name for name in {names!r} if importlib.util.find_spec(name)]))
"""
    assert run(bare, unpacked, code.format(names=LIBRARIES)) == []


def test_everything_a_host_runs_is_in_the_core(bare: Path, core: Path) -> None:
    code = """
import json
import skyfab, cloudpickle
import skyfab.host.agent.link, skyfab.host.agent.agent, skyfab.host.agent.worker, skyfab.host.agent.zygote
print(json.dumps([skyfab.__file__, skyfab.host.agent.worker.__file__, cloudpickle.__file__]))
"""
    for file in run(bare, core, code):
        assert file.startswith(str(core))


def test_every_module_of_the_host_side_can_be_imported_with_the_core_alone(bare: Path, core: Path) -> None:
    """Also those that are imported only when they are needed."""
    names = [
        ".".join(path.relative_to(core).with_suffix("").parts).removesuffix(".__init__")
        for package in ("host", "protocol")
        for path in sorted((core / "skyfab" / package).rglob("*.py"))
        if "device" not in path.parts  # it imports torch
    ]
    assert len(names) > 10
    assert (
        run(
            bare,
            core,
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


def test_what_functions_use_works_there(bare: Path, unpacked: Path) -> None:
    """The decorators, the rank's place and its share of the data, images, errors: with the standard library alone."""
    code = """
import json
import skyfab as sky

@sky.function(timeout=3)
def double(x): return 2 * x

@sky.stdout(only="head")
@sky.function
def quiet(): return 1

call = double(21)
image = sky.Image(pip=["numpy"], env={"A": "1"})
error = sky.HostLost("gone", host="node1", hint="look")
print(json.dumps([
    double.fn(21), call.args[0], quiet.fn(), list(image.pip), sky.instance_info().world_size, sky.shard([1, 2, 3]),
    str(error),
    isinstance(sky.BroadcastError("x", [ValueError("y")]), sky.SkyfabError),
]))
"""
    assert run(bare, unpacked, code) == [42, 21, 1, ["numpy"], 1, [1, 2, 3], "node1: gone\nhint: look", True]


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


def test_a_function_travels_there_and_back(bare: Path, unpacked: Path) -> None:
    """Pickled and unpickled by the bundle's own cloudpickle, a closure and an error included."""
    code = """
import json
from skyfab.protocol import codec
import skyfab as sky

def make(n):
    return lambda x: x + n

there = lambda value: codec.loads(codec.dumps(value).data)
error = there(sky.WorkerDied("gone", exitcode=-9, host="node1", rank=2))
print(json.dumps([there(make(2))(40), str(error), error.exitcode]))
"""
    assert run(bare, unpacked, code) == [42, "node1[2]: gone", -9]


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


# ---- the library

IMPORTS = """
import json, time
from skyfab.host.agent import library
library.install()
began = time.monotonic()
import skyfab
print(json.dumps([skyfab.Compute.__module__, time.monotonic() - began]))
"""


def test_what_imports_the_library_waits_for_it(bare: Path, core: Path) -> None:
    assert not library.is_here(str(core))
    arrives = threading.Timer(0.5, lambda: write_at_once(core / library.ARCHIVE, bundle().library))
    arrives.start()
    module, seconds = run(bare, core, IMPORTS)
    arrives.join()
    assert module == "skyfab.pool.compute"
    assert seconds > 0.1
    assert library.is_here(str(core))
    assert not [path.name for path in core.iterdir() if path.name.startswith(".")], "no draft stays"
    assert run(bare, core, IMPORTS)[0] == module, "and is there from then on"


def test_several_processes_unpack_the_library_at_once(bare: Path, core: Path) -> None:
    write_at_once(core / library.ARCHIVE, bundle().library)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: run(bare, core, IMPORTS)[0], range(4)))
    assert found == ["skyfab.pool.compute"] * 4


def test_a_library_that_does_not_arrive_is_an_error_that_says_so(core: Path) -> None:
    finder = library.Finder(str(core), ["pool"], patience=0.05)
    with pytest.raises(ModuleNotFoundError, match=r"skyfab\.pool has not arrived on this host"):
        finder.find_spec("skyfab.pool", [str(core / "skyfab")])


def test_a_host_without_room_for_the_library_says_so_at_once(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ROOM", 1 << 60)
    began = time.monotonic()
    with pytest.raises(ModuleNotFoundError, match="No space left on the disk of"):
        library.Finder(str(core), ["pool"], patience=60).find_spec("skyfab.pool", [str(core / "skyfab")])
    assert time.monotonic() - began < 30


def test_a_damaged_library_is_deleted_so_that_it_is_sent_again(core: Path) -> None:
    (core / library.ARCHIVE).write_bytes(bundle().library[:-1000])
    with pytest.raises(ImportError, match="is damaged"):
        library.Finder(str(core), ["pool"]).find_spec("skyfab.pool", [str(core / "skyfab")])
    assert not library.is_here(str(core))
    assert not [path.name for path in core.iterdir() if path.name.startswith(".")]


def test_the_library_comes_in_pieces_and_is_there_when_the_last_one_is(core: Path) -> None:
    writer = library.LibraryWriter(str(core))
    content = bundle().library
    name = name_of(content)
    for at in range(0, len(content), 10_000):
        assert not library.is_here(str(core))
        piece = content[at : at + 10_000]
        ends = at + 10_000 >= len(content)
        writer.take(messages.Library(name=name, parts=[len(piece)], begins=not at, ends=ends), memoryview(piece))
    assert (core / library.ARCHIVE).read_bytes() == content


def test_a_piece_of_a_library_that_did_not_begin_is_refused(core: Path) -> None:
    writer = library.LibraryWriter(str(core))
    piece = memoryview(b"x")
    with pytest.raises(ProtocolError, match="did not begin"):
        writer.take(messages.Library(name="0" * 64, parts=[1], begins=False, ends=True), piece)
    with pytest.raises(ProtocolError, match="arrived damaged"):
        writer.take(messages.Library(name="0" * 64, parts=[1], begins=True, ends=True), piece)
    writer.take(messages.Library(name="0" * 64, parts=[1], begins=True, ends=False), piece)
    writer.close()
    assert not library.is_here(str(core))
    assert not [path.name for path in core.iterdir() if path.name.startswith(".")]


def test_the_library_is_waited_for_only_by_what_is_in_it(core: Path) -> None:
    finder = library.Finder(str(core), ["pool"], patience=60)
    for name in ("skyfab.cli", "skyfab.pool.nothing", "pool", "numpy"):
        assert finder.find_spec(name, [str(core / "skyfab")]) is None


def test_a_checkout_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.is_here()
    before = list(sys.meta_path)
    library.install()
    assert sys.meta_path == before


def write_at_once(path: Path, content: bytes) -> None:
    draft = path.with_name(".draft")
    draft.write_bytes(content)
    draft.rename(path)


# ---- the archive


def test_the_bundle_is_the_same_every_time() -> None:
    """Two programs with the same skyfab share what is on a host: same digest, same bytes."""
    code = (
        "import hashlib\n"
        "from skyfab.session.bundle import bundle\n"
        "print(bundle().digest, *(hashlib.sha256(part).hexdigest() for part in (bundle().archive, bundle().library)))\n"
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
    assert first.library == second.library


def test_another_file_makes_another_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its content, its name, and where one ends and the next begins: all of that is in the digest."""
    digests = set()
    for files in (), (("a", b"1"),), (("a", b"2"),), (("b", b"1"),), (("a", b"1"), ("b", b"1")), (("a", b"1b1"),):
        monkeypatch.setattr("skyfab.session.bundle._files", lambda files=files: iter(files))
        digests.add(bundle.__wrapped__().digest)
    assert len(digests) == 6


@pytest.mark.parametrize("archive", ["archive", "library"])
def test_the_archives_hold_plain_files_with_plain_names(archive: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(getattr(bundle(), archive))) as tar:
        entries = tar.getmembers()
    names = [entry.name for entry in entries]
    assert len(set(names)) == len(names)
    for entry in entries:
        assert entry.isfile()
        assert not entry.name.startswith("/")
        assert ".." not in entry.name.split("/")
        assert entry.name.endswith((".py", ".sh", ".txt"))
        assert "__pycache__" not in entry.name
        assert (entry.uid, entry.gid, entry.mtime, entry.uname) == (0, 0, 0, "")


def test_the_core_and_the_library_are_all_of_skyfab_but_what_no_host_needs() -> None:
    core, rest = dict(bundle().core), dict(bundle().rest)
    assert next(iter(core)) == "__main__.py"
    assert not core.keys() & rest.keys()
    assert {"skyfab/__init__.py", "skyfab/host/agent/link.py", "cloudpickle/__init__.py"} <= core.keys()
    assert "skyfab/pool/compute.py" in rest
    packages = {path.split("/")[1] for path in rest}
    assert core[LIBRARY_NAMES].decode().split() == sorted(packages)
    assert not packages & {"host", "protocol", "examples", "cli"}


def test_scripts_are_read_there_as_they_are_here(bare: Path, unpacked: Path) -> None:
    """A function on a host may open a pool, which sends them on."""
    paths = [path.removeprefix("skyfab/") for path, _ in bundle().rest if path.endswith(".sh")]
    assert {"session/bootstrap.sh", "env/probe.sh", "detached/alive.sh"} <= set(paths)
    code = "import json\nfrom skyfab._util.scripts import read\nprint(json.dumps([read(path) for path in {}]))"
    assert run(bare, unpacked, code.format(paths)) == [read(path) for path in paths]


def test_the_bundle_is_small() -> None:
    """The core is sent to every new host before anything else. Programs that use no lab send none."""
    code = """
from skyfab.session.bundle import bundle
print(len(bundle().archive), len(bundle().library), *(path for path, _ in bundle().rest))
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) < 110 * 1024
    assert int(said[1]) < 300 * 1024  # sent behind the first calls
    assert not [path for path in said[2:] if path.startswith("skyfab/lab/")]
    assert "skyfab/lab/lab.py" in dict(bundle().rest), "this one uses it"
    assert gzip.decompress(bundle().archive)


def test_the_bundle_is_a_value() -> None:
    with pytest.raises(AttributeError):
        bundle().digest = "x"  # type: ignore[misc]
    assert isinstance(bundle(), Bundle)
    assert len(bundle().digest) == 64


SOURCES = [file for file in (*bundle().core, *bundle().rest) if file[0].endswith(".py")]


def statements(source: bytes) -> tuple[str, list[int]]:
    """What is executed, and in which lines."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
            node.body = kept  # type: ignore[attr-defined]
    return ast.dump(tree), [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]


@pytest.mark.parametrize("file", SOURCES, ids=[path for path, _ in SOURCES])
def test_without_docstrings_and_comments_the_code_is_the_same(file: tuple[str, bytes]) -> None:
    assert statements(without_prose(file[1])) == statements(file[1])


def test_docstrings_and_comments_are_not_sent() -> None:
    source = (
        '"""Doc."""\n# one\nTEXT = """\n# kept\n"""\ndef f():\n    """Two\n    lines."""\n    # two\n    return "#"\n'
    )
    sent = '""""""\n\nTEXT = """\n# kept\n"""\ndef f():\n    """\n"""\n\n    return "#"\n'
    assert without_prose(source.encode()).decode() == sent
