"""CPython's own tests of executors, run against a pool's.

Many Pythons lack them. Debian has those of its own Python in a package that `./inv test` installs; they also serve
another Python of the same minor version. Hosts are sent their functions by value.
"""

from __future__ import annotations

import importlib
import sys
import unittest
import warnings
from collections.abc import Iterator
from pickle import UnpicklingError
from types import ModuleType
from typing import Any

import pytest

import skyfab as sky
from skyfab.errors import NotPicklable, WorkerDied
from skyfab.protocol import codec

pytestmark = [pytest.mark.slow]

PARTS = ("", ".executor", ".test_as_completed", ".test_deadlock", ".test_shutdown", ".test_wait", ".util")
"""One module until Python 3.11, several from then on."""
CLASSES = ("ExecutorTest", "ProcessPoolExecutorTest", "WaitTests", "AsCompletedTests", "ExecutorShutdownTest")
CLASSES += ("ProcessPoolShutdownTest", "ExecutorDeadlockTest")

DEBIAN = "/usr/lib/python{}.{}/test".format(*sys.version_info)
MISSING = "no tests of CPython: apt-get install libpython{}.{}-testsuite".format(*sys.version_info)

PROCESSES = "looks at the processes or the thread of a ProcessPoolExecutor"
INTERPRETER = "is about the end of an interpreter with an executor: here the pool has the processes, and is closed"
OPTIONS = "is about options of the constructor: max_workers, mp_context, max_tasks_per_child"
ONE_DIES = "a dead process breaks a ProcessPoolExecutor; here it is replaced, and its call alone raises WorkerDied"
LEFT_OUT = {
    "test_context_manager_shutdown": PROCESSES,
    "test_del_shutdown": PROCESSES,
    "test_hang_gh83386": INTERPRETER,
    "test_hang_gh94440": INTERPRETER,
    "test_idle_process_reuse_multiple": PROCESSES,
    "test_idle_process_reuse_one": PROCESSES,
    "test_interpreter_shutdown": INTERPRETER,
    "test_killed_child": ONE_DIES,
    "test_max_tasks_early_shutdown": OPTIONS,
    "test_max_tasks_per_child": OPTIONS,
    "test_max_tasks_per_child_defaults_to_spawn_context": OPTIONS,
    "test_max_workers_negative": OPTIONS,
    "test_max_workers_too_large": OPTIONS,
    "test_processes_terminate": PROCESSES,
    "test_ressources_gced_in_workers": "passes a proxy of a multiprocessing manager",
    "test_saturation": PROCESSES,
    "test_shutdown_deadlock": ONE_DIES,
    "test_shutdown_deadlock_pickle": PROCESSES,
    "test_shutdown_no_wait": PROCESSES,
    "test_submit_after_interpreter_shutdown": INTERPRETER,
    "test_traceback": "the cause is a RemoteTraceback of skyfab: tests/engines/test_executor.py",
}
"""Tests that do not apply, each with the reason."""


def suite() -> dict[str, type]:
    """The classes of tests by name; empty where there are none."""
    import test  # of Python, not this folder: Debian's is always there, mostly empty

    found: dict[str, type] = {}
    test.__path__.append(DEBIAN)
    for part in PARTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated modules
                module: ModuleType = importlib.import_module(f"test.test_concurrent_futures{part}")
        except ImportError:
            continue
        codec.send_by_value(module)
        found |= {name: kind for name, kind in vars(module).items() if name in (*CLASSES, "BaseTestCase")}
    return found


SUITE = suite()
TESTS = sorted(
    f"{name}.{test}" for name in CLASSES if name in SUITE for test in vars(SUITE[name]) if test.startswith("test_")
)
CHOSEN = [test for test in TESTS if test.partition(".")[2] not in LEFT_OUT]


@pytest.fixture(scope="module")
def five_slots(home: object) -> Iterator[sky.Compute]:
    """As many as the tests want workers. On this machine, because hosts of the lab do not have the tests."""
    with sky.Compute("local", slots=5, ui="none") as compute:
        yield compute


def executor_of(compute: sky.Compute) -> type:
    """What a test constructs in place of an executor's class."""

    class Tested:
        executor_type = staticmethod(lambda max_workers=5, mp_context=None: compute.executor())
        worker_count = 5

        def setUp(self) -> None:
            super().setUp()  # type: ignore[misc]
            self.executor = self.executor_type()

        def tearDown(self) -> None:
            self.executor.shutdown()
            super().tearDown()  # type: ignore[misc]

        def get_context(self) -> None:
            return None

        def _check_crash(self: Any, error: type[BaseException], func: Any, *args: Any, **_: object) -> None:
            """A failure is that of its own call, as one of skyfab's errors, and the next one is made."""
            future = self.executor.submit(func, *args)
            with pytest.raises(error if error is RuntimeError else (WorkerDied, NotPicklable, UnpicklingError)):
                future.result(timeout=60)
            assert self.executor.submit(pow, 2, 3).result(timeout=60) == 8

    return Tested


@pytest.mark.skipif(not SUITE, reason=MISSING)
@pytest.mark.parametrize("test", CHOSEN or ["none"])
def test_as_of_cpython(test: str, five_slots: sky.Compute) -> None:
    kind, _, name = test.partition(".")
    case = type(kind, (executor_of(five_slots), SUITE[kind], SUITE["BaseTestCase"]), {})(name)
    result = unittest.TestResult()
    case.run(result)
    problems = [text for _, text in (*result.errors, *result.failures)]
    assert not problems, "\n".join(problems)
    if result.skipped:
        pytest.skip(result.skipped[0][1])


@pytest.mark.skipif(not SUITE, reason=MISSING)
def test_most_apply() -> None:
    assert len(CHOSEN) >= 30
