"""The hooks of a plugin: where each runs, in which order, and what it sees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import skyfab as sky

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
SAID: list[str] = []
"""What the plugins have said in this process."""


class Diary(sky.plugins.Plugin):
    """Writes down what happens."""

    def __init__(self, name: str) -> None:
        self.name = name

    def transform(self, image: sky.Image, host: sky.Host) -> sky.Image:
        return sky.Image(env={**image.env, "DIARY": image.env.get("DIARY", "") + f"{self.name}@{host.name} "})

    @contextmanager
    def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
        SAID.append(f"{self.name} process {info.rank}/{info.world_size}")
        yield

    @contextmanager
    def around_call(self, info: sky.InstanceInfo) -> Iterator[None]:
        SAID.append(f"{self.name} before {info.rank}")
        yield
        SAID.append(f"{self.name} after {info.rank}")

    @contextmanager
    def around_client(self, compute: sky.Compute) -> Iterator[None]:
        SAID.append(f"{self.name} opens {len(compute.hosts)}")
        yield
        SAID.append(f"{self.name} closes {len(compute.hosts)}")


@sky.function
def said() -> list[str]:
    return SAID.copy()


@sky.function
def fail() -> None:
    raise KeyError("mine")


@sky.function
def variable(name: str) -> str | None:
    return os.environ.get(name)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Nothing has been said here before a test."""
    SAID.clear()
    yield
    SAID.clear()


def test_hooks_are_entered_in_order_and_left_in_reverse(open_pool: Callable[..., sky.Compute]) -> None:
    """A process's once, before its first call; a call's around each."""
    pool = open_pool(ranks=2, plugins=[Diary("a"), Diary("b")])
    entered = ["a process {0}/2", "b process {0}/2"]
    before, after = ["a before {0}", "b before {0}"], ["b after {0}", "a after {0}"]
    for told in (entered + before, entered + before + after + before):
        assert said() @ pool == [[line.format(rank) for line in told] for rank in range(2)]


def test_hooks_are_left_when_the_function_fails(open_pool: Callable[..., sky.Compute]) -> None:
    """The exception passes through them, so this plugin's last line is not written; the next call is surrounded."""
    pool = open_pool(plugins=[Diary("a")])
    with pytest.raises(KeyError, match="mine"):
        fail() >> pool
    assert said() >> pool == ["a process 0/1", "a before 0", "a before 0"]


def test_the_client_is_surrounded_while_the_pool_is_open() -> None:
    with sky.Compute("local", plugins=[Diary("a"), Diary("b")], ui="none"):
        assert SAID == ["a opens 1", "b opens 1"]
    assert SAID[2:] == ["b closes 1", "a closes 1"]


def test_each_host_gets_the_image_that_the_plugins_want_there(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool(count=2, plugins=[Diary("a"), Diary("b")])
    assert variable("DIARY") @ pool == ["a@here1 b@here1 ", "a@here2 b@here2 "]


def test_the_example_in_the_docs_runs_and_prints_what_it_says(tmp_path: Path) -> None:
    (program,) = (
        text for text in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "__main__" in text
    )
    (tmp_path / "seeded.py").write_text(program)
    shown = subprocess.run(
        [sys.executable, "seeded.py"], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=True
    )
    assert shown.stdout == "True\n"


class Slow(sky.plugins.Plugin):
    @contextmanager
    def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
        time.sleep(0.3)
        SAID.append("slow")
        yield


class Counter:
    def entered(self) -> int:
        return SAID.count("slow")

    def end(self) -> None:
        os._exit(1)


def test_hooks_of_an_actor_with_threads_run_once(open_pool: Callable[..., sky.Compute]) -> None:
    actor = open_pool(plugins=[Slow()]).actor(Counter, concurrency=4, restarts=1)
    with pytest.raises(sky.ActorLost):
        actor.end()
    assert [future.result() for future in [actor.entered.submit() for _ in range(4)]] == [1] * 4


def test_a_process_whose_hooks_failed_is_not_used_again(tmp_path: Path) -> None:
    mark = str(tmp_path / "once")

    class Shy(sky.plugins.Plugin):
        @contextmanager
        def around_process(self, info: sky.InstanceInfo) -> Iterator[None]:
            if not Path(mark).exists():
                Path(mark).touch()
                raise RuntimeError("not yet")
            os.environ["SHY"] = "here"
            yield

    @sky.function
    def found() -> str | None:
        return os.environ.get("SHY")

    with sky.Compute("local", plugins=[Shy()], ui="none") as pool:
        with pytest.raises(RuntimeError, match="not yet"):
            found() >> pool
        assert found() >> pool == "here"


READS_AT_IMPORT = """
import os
if os.environ.get("IN_A_HOST") and os.environ.get("KERAS_BACKEND") != "numpy":
    raise ModuleNotFoundError("No module named 'tensorflow'")
FOUND = os.environ.get("OWN_VARIABLE")
"""
PROGRAM = """
import os
from contextlib import contextmanager
import keras
import skyfab as sky

HEARD = []

class Own(sky.plugins.Plugin):
    @contextmanager
    def around_process(self, info):
        os.environ["OWN_VARIABLE"] = "set"
        HEARD.append("entered")
        yield

class Answer:
    def __reduce__(self):
        return getattr, (keras, "FOUND")

@sky.function
def found(given=None):
    return keras.FOUND, HEARD, given

if __name__ == "__main__":
    plugins = [sky.plugins.keras(backend="numpy"), Own()]
    ELASTIC
    with sky.Compute("local", plugins=plugins, env={"IN_A_HOST": "1"}, ui="none") as pool:
        print(CALL)
"""
AT_TOP = {
    "a call": ("", "found(Answer()) >> pool"),
    "a gang": ("", "found(Answer()) @ pool"),
    "an elastic gang": ("plugins.append(sky.plugins.torch(elastic=(1, 1)))", "found(Answer()) @ pool"),
    "a device": ("import torch", "sky.run_on(pool.device('cpu'), found.fn)"),
}


@pytest.mark.parametrize(
    "kind",
    [
        "a call",
        "a gang",
        pytest.param("an elastic gang", marks=[pytest.mark.slow, pytest.mark.torch]),
        pytest.param("a device", marks=[pytest.mark.slow, pytest.mark.torch]),
    ],
)
def test_plugins_are_entered_before_the_programs_modules_are_imported(tmp_path: Path, kind: str) -> None:
    """Keras, imported at the top of a program, reads its backend's name at once; arguments too."""
    more, call = AT_TOP[kind]
    (tmp_path / "keras.py").write_text(READS_AT_IMPORT)
    (tmp_path / "program.py").write_text(PROGRAM.replace("ELASTIC", more).replace("CALL", call))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=170, check=False
    )
    # A device's function comes in a message of its own: it shares no globals with the plugins.
    result = ("set", [], None) if kind == "a device" else ("set", ["entered"], "set")
    assert done.stdout.strip() == str([result] if "gang" in kind else result), done.stderr
