"""joblib's own tests of backends, run against that of a pool: those that take a backend, with all parameters."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import skyfab as sky

joblib: Any = pytest.importorskip("joblib")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(pytest.mark, "_config", None)  # they have markers of their own
    from joblib.test import test_parallel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAM = "starts a program of its own, which does not have the pool"
LOKY = "is about the processes of loky: their number, environment, initializer or shared memory"
LEFT_OUT = {
    "test_auto_memmap_on_arrays_from_generator": LOKY,
    "test_backend_batch_statistics_reset": "has a number of tasks that is meant for processes of this machine",
    "test_backend_nesting_level": "starts processes of loky here too",
    "test_background_thread_parallelism": "uses loky, whatever its parameter is",
    "test_dispatch_multiprocessing": "passes proxies of a multiprocessing manager, whose secret hosts do not have",
    "test_error_capture": "raises KeyboardInterrupt in tasks, which is a RemoteError here: not the user's Ctrl-C",
    "test_initializer_context": LOKY,
    "test_initializer_parallel": LOKY,
    "test_memmapping_leaks": LOKY,
    "test_nested_backend_in_sequential": "compares with a class that is registered; here it is a function",
    "test_nested_parallel_warnings": "is about warnings in processes of joblib that start processes",
    "test_no_blas_crash_or_freeze_with_subprocesses": LOKY,
    "test_parallel_thread_limit": "needs a compiled helper, which joblib's wheels do not have",
    "test_parallel_with_interactively_defined_functions": PROGRAM,
    "test_parallel_with_unpicklable_functions_in_args": PROGRAM,
    "test_thread_bomb_mitigation": PROGRAM,
}
"""Tests that do not apply, each with the reason."""


BACKEND = {"backend", "parent_backend", "outer_backend"}
OTHER = {"test_multiple_generator_call_separated_gc": {"error": False}}
"""What is expected instead: of loky there is one, which two calls cannot have at a time."""


def parameters(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """The sets of arguments that joblib gives a test for loky, with the pool in its place.

    A second backend is that of tasks, on hosts, and stays what it is.
    """
    choices: list[list[dict[str, Any]]] = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = (
                [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            )
            rows = [dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in mark.args[1]]
            for name in BACKEND & {*names}:
                rows = [{**row, name: "skyfab"} for row in rows if row[name] == "loky"]
            choices.append(rows)
    for found in itertools.product(*choices):
        yield {name: value for one in found for name, value in one.items()} | OTHER.get(test.__name__, {})


TESTS = {
    name: test
    for name, test in vars(test_parallel).items()
    if name.startswith("test_") and BACKEND & inspect.signature(test).parameters.keys()
}
CASES = [
    pytest.param(
        name, given, id=f"{name[5:]}-{'-'.join(getattr(value, '__name__', str(value)) for value in given.values())}"
    )
    for name, test in TESTS.items()
    if name not in LEFT_OUT
    for given in parameters(test)
]


@pytest.fixture(scope="module")
def four_slots(home: object) -> Iterator[None]:
    with sky.Compute("local", slots=4, ui="none", plugins=[sky.plugins.joblib()]):
        yield


@pytest.mark.usefixtures("four_slots")
@pytest.mark.parametrize(("name", "given"), CASES)
def test_as_of_joblib(
    name: str, given: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joblib.parallel._backend, "config", joblib.parallel.default_parallel_config)
    test = TESTS[name]
    fixtures = inspect.signature(test).parameters.keys() - given.keys()
    test(**given, **{fixture: request.getfixturevalue(fixture) for fixture in fixtures})


def test_most_apply() -> None:
    assert LEFT_OUT.keys() <= TESTS.keys()
    assert len(TESTS) - len(LEFT_OUT) >= 25
