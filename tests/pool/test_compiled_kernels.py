"""Kernels that one host of a pool has compiled, and that the others get."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky
from skyfab._util.cache import cache_folder
from skyfab.errors import ProtocolError
from skyfab.files.entries import walk
from skyfab.files.source import Source
from skyfab.files.transfer import Here
from skyfab.pool.compiled import _Exchange

Open = Callable[..., sky.Compute]
# Not importorskip: ranks import this module, and torch takes seconds.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="no torch")


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches of this machine and of hosts. Hosts of all tests share them: a new one has to compile skyfab anew."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch: pytest.MonkeyPatch, caches: Path) -> None:
    """Kernels of other tests are not found, neither here nor on hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches / "here"))
    for folder in (cache_folder(), *caches.iterdir()):
        shutil.rmtree(folder / "compiled", ignore_errors=True)


@pytest.fixture
def pair(caches: Path) -> Iterator[Open]:
    """Opens two hosts on this machine, each with a cache of its own."""
    opened: list[sky.Compute] = []

    def open_it(names: str = "ab", **options: Any) -> sky.Compute:
        hosts = [sky.Host(name=name, transport="local", cache=str(caches / name)) for name in names]
        opened.append(sky.Compute(hosts, ui="none", **options).open())
        return opened[-1]

    yield open_it
    for compute in opened:
        compute.close()


def compile_by_hand(content: str) -> str:
    """Leaves what a compiler does, and what belongs to this host alone. A real one takes longer."""
    import numpy as np

    assert np
    folder = Path(os.environ["TRITON_CACHE_DIR"], "ab")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.so").write_text(content)
    (folder / "half.so").write_text("half")
    (folder / "half_CxxBuild").mkdir(exist_ok=True)
    (folder / "kernel.lock").write_text("")
    (folder / ".12.34.tmp").write_text("half")
    time.sleep(1.1)
    return str(folder)


def has_compiled(name: str = "kernel.so") -> str:
    found = Path(os.environ["TRITON_CACHE_DIR"], "ab", name)
    return found.read_text() if found.exists() else ""


def names() -> list[str]:
    return sorted(path.name for path in Path(os.environ["TRITON_CACHE_DIR"], "ab").iterdir())


def with_numpy() -> str:
    import numpy as np

    assert np
    return has_compiled()


def test_what_one_host_has_compiled_others_get_at_once_or_later_and_only_what_is_complete(pair: Open) -> None:
    compute = pair()
    compute.run(sky.function(compile_by_hand)("fast"))
    other = compute.hosts[1].name
    until(lambda: compute.submit(sky.function(has_compiled)(), on=other).result() == "fast", "the kernel is there")
    assert compute.submit(sky.function(names)(), on=other).result() == ["kernel.so"]
    until(lambda: any((cache_folder() / "compiled").glob("*/triton/ab/kernel.so")), "this machine has a copy")
    compute.close()
    later = pair("cd")
    later.run(sky.function(with_numpy)())
    until(lambda: later.run(sky.function(has_compiled)()) == "fast", "a later pool gets it from this machine")


def test_hosts_that_are_not_trusted_get_no_code_of_others(pair: Open) -> None:
    compute = pair(results="data")
    compute.run(sky.function(compile_by_hand)("hostile"))
    compute.run(sky.function(compile_by_hand)("hostile"))
    assert not (cache_folder() / "compiled").exists()


def test_a_host_whose_answer_is_not_a_key_is_left_out(pair: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name from a host must not become a path here."""
    from skyfab.pool import compiled as here

    seen: list[str] = []

    def hostile(request: str, value: Any) -> Any:
        seen.append(request)
        return "../../outside"

    monkeypatch.setattr(here, "check", hostile)
    compute = pair()
    compute.run(sky.function(compile_by_hand)("fast"))
    until(lambda: "compiled" in seen, "it was asked")
    compute.close()
    assert not (cache_folder() / "compiled").exists()
    assert not (cache_folder().parent / "outside").exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_host_cannot_fill_this_machine_with_what_has_no_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_folder: bool
) -> None:
    for number in range(30):
        path = tmp_path / "there" / str(number)
        (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr("skyfab.pool.compiled._MOST", 20 * 4096)
    exchange = _Exchange([], lambda node, tree: node)
    source = Here(Source(walk(os.fsencode(tmp_path / "there"), b"", []), []))
    monkeypatch.setattr(exchange, "_open", lambda node, way: nullcontext((source, "0" * 40)))
    with pytest.raises(ProtocolError):
        exchange._take(None)  # type: ignore[arg-type]
    assert len([*(cache_folder() / "compiled" / ("0" * 40)).iterdir()]) <= 20


def first_step() -> tuple[float, dict[str, int]]:
    """The seconds of the first step of a compiled model, and how its graphs were found."""
    import torch
    from torch._dynamo.utils import counters

    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)))
    began = time.perf_counter()
    model(torch.ones(8, 64)).sum().backward()
    return time.perf_counter() - began, dict(counters["inductor"])


def files() -> int:
    found = os.walk(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    return sum(len(names) for folder, _, names in found if not folder.endswith("/locks"))


@pytest.mark.torch
@pytest.mark.slow
def test_a_model_that_one_host_has_compiled_is_not_compiled_again(lent_hosts_of: Callable[..., list[sky.Host]]) -> None:
    with sky.Compute(lent_hosts_of("openssh"), ui="none") as compute:
        first, second = [node.name for node in compute.hosts]
        _, found = compute.submit(sky.function(first_step)(), on=first).result()
        assert found["fxgraph_cache_miss"] == 2
        wanted = compute.submit(sky.function(files)(), on=first).result()
        until(lambda: compute.submit(sky.function(files)(), on=second).result() >= wanted, "the other host has them")
        _, found = compute.submit(sky.function(first_step)(), on=second).result()
    assert found["fxgraph_cache_hit"] == 2
