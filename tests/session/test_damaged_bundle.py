"""A copy of skyfab on a host of which files are damaged, as after a power cut: it is recognized, and sent again."""

from __future__ import annotations

from pathlib import Path

import pytest

import skyfab as sky
from skyfab.inventory.inventory import Inventory
from skyfab.session.ask import Asker
from skyfab.session.bundle import bundle
from skyfab.session.question import Question, only


@sky.function
def double(number: int) -> int:
    return 2 * number


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a host that has a copy, after a call."""
    folder = tmp_path_factory.mktemp("cache")
    assert called(folder) == 42
    return folder


@pytest.fixture
def copy(cache: Path) -> Path:
    return cache / "bundles" / bundle().digest


def here(cache: Path) -> sky.Host:
    return sky.Host(name="here", transport="local", cache=str(cache))


def called(cache: Path) -> int:
    with sky.Compute([here(cache)], ui="none") as compute:
        result: int = double(21) >> compute
    return result


@pytest.mark.parametrize("damaged", ["skyfab/host/agent/worker.py", "sizes", "__main__.py"])
def test_an_empty_file_is_replaced(copy: Path, cache: Path, damaged: str) -> None:
    (copy / damaged).write_bytes(b"")
    assert called(cache) == 42
    assert (copy / damaged).stat().st_size


def test_a_copy_of_empty_files_is_replaced(copy: Path, cache: Path) -> None:
    for path in filter(Path.is_file, copy.rglob("*")):
        path.write_bytes(b"")
    assert called(cache) == 42


def test_a_missing_file_and_one_that_is_cut_off_are_replaced_before_a_question_is_answered(
    copy: Path, cache: Path
) -> None:
    module, sizes = copy / "skyfab/host/ask/serve.py", copy / "sizes"
    half = sizes.read_text()[: sizes.stat().st_size // 2].rpartition("\n")[0] + "\n"
    for damage in (module.unlink, lambda: sizes.write_text(half)):
        damage()
        question = Question("survey", lambda host, replies: only(replies))
        with Asker([here(cache)], Inventory(hosts={})) as asker:
            assert asker.ask(question)[0].error is None
        assert module.exists() and sizes.read_text() != half


def test_a_copy_that_is_whole_is_not_sent_again(copy: Path, cache: Path) -> None:
    before = copy.stat().st_ino
    assert called(cache) == 42
    assert copy.stat().st_ino == before
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
