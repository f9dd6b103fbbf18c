"""`plugins.joblib()`: joblib and scikit-learn on a pool, what is sent for them, and what happens when tasks fail."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import labs
from stage.spot import until

import skyfab as sky
from skyfab.errors import NotPicklable, RemoteError, WorkerDied


@pytest.fixture(scope="module", autouse=True)
def joblib() -> Any:
    return pytest.importorskip("joblib")


@pytest.fixture(scope="module")
def three(home: object) -> Iterator[sky.Compute]:
    with sky.Compute("local", slots=3, ui="none", plugins=[sky.plugins.joblib()]) as compute:
        yield compute


def square(number: int) -> int:
    return number * number


def reciprocal(number: int) -> float:
    return 1 / number


def where(_: int) -> tuple[int, str | None]:
    return os.getpid(), os.environ.get("OMP_NUM_THREADS")


def touch(folder: str, number: int, seconds: float) -> int:
    """Leaves a file while it runs; returns how many there are."""
    path = Path(folder, str(number))
    path.touch()
    time.sleep(seconds)
    count = len(list(Path(folder).iterdir()))
    path.unlink()
    return count


def total(array: Any, factor: int, more: Any = None) -> float:
    return float(array.sum()) * factor + (0 if more is None else float(more.sum()))


def inner(number: int) -> tuple[str, list[int]]:
    import joblib

    parallel = joblib.Parallel(n_jobs=2)
    return type(parallel._backend).__name__, parallel(joblib.delayed(square)(each) for each in range(number))


class Stubborn(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def be_stubborn(_: int) -> None:
    raise Stubborn("inside")


def test_the_pool_is_the_default_backend_until_it_closes(joblib: Any) -> None:
    for _ in range(2):
        assert type(joblib.parallel.get_active_backend()[0]).__name__ == "LokyBackend"
        with sky.Compute("local", slots=2, ui="none", plugins=[sky.plugins.joblib()]) as compute:
            found = joblib.Parallel(n_jobs=-1)(joblib.delayed(where)(number) for number in range(20))
            assert {pid for pid, _ in found}.isdisjoint({os.getpid()})
            assert joblib.effective_n_jobs(-1) == 2
            assert compute.executor().slots == 2
        assert "skyfab" not in joblib.parallel.BACKENDS
    assert type(joblib.parallel.get_active_backend()[0]).__name__ == "LokyBackend"


def test_jobs_are_slots(joblib: Any, three: sky.Compute) -> None:
    counts = {jobs: joblib.effective_n_jobs(jobs) for jobs in (-1, None, 1, 2, 3, 100, -2, -3, -9)}
    assert counts == {-1: 3, None: 3, 1: 1, 2: 2, 3: 3, 100: 3, -2: 2, -3: 1, -9: 1}
    with pytest.raises(ValueError, match="n_jobs == 0"):
        joblib.Parallel(n_jobs=0)([joblib.delayed(square)(1)])
    (pid, _), (other, _) = joblib.Parallel(n_jobs=1)(joblib.delayed(where)(each) for each in range(2))
    assert pid == other == os.getpid(), "one job is run here, as joblib does"


def test_parallel_code_inside_of_tasks_uses_threads(joblib: Any, three: sky.Compute) -> None:
    found = joblib.Parallel(n_jobs=-1)(joblib.delayed(inner)(3) for _ in range(4))
    assert found == [("ThreadingBackend", [0, 1, 4])] * 4


def test_a_large_array_is_sent_once_by_its_content(
    joblib: Any, three: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy = pytest.importorskip("numpy")
    from skyfab.engines import joblib_backend

    made: list[Any] = []
    put = vars(joblib_backend)["put"]
    monkeypatch.setattr(joblib_backend, "put", lambda value: made.append(value) or put(value))
    joblib.Parallel(n_jobs=-1)([joblib.delayed(square)(1)])  # sends this module
    before = set(three.hosts[0].store._blobs)
    array = numpy.ones(500_000)
    part = array[:200_000]
    found = joblib.Parallel(n_jobs=-1, batch_size=1)(
        joblib.delayed(total)(array, each, more=part) for each in range(30)
    )
    assert found == [500_000.0 * each + 200_000 for each in range(30)]
    assert [len(value) for value in made] == [500_000, 200_000]
    assert len(three.hosts[0].store._blobs - before) == 2
    array[:] = 2
    found = joblib.Parallel(n_jobs=-1)(joblib.delayed(total)(array, each) for each in range(10))
    assert found == [1_000_000.0 * each for each in range(10)], "changed since"
    apart = [numpy.full(200_000, each) for each in range(10)]
    made.clear()
    assert joblib.Parallel(n_jobs=-1)(joblib.delayed(total)(one, 1) for one in apart) == [
        200_000.0 * each for each in range(10)
    ]
    assert not made, "an array of one task is not kept on the host"
    text = numpy.str_("x" * 600_000)
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(len)(text) for _ in range(2)) == [600_000] * 2


def cleared(array: Any, number: int) -> float:
    array[:] = 0
    return number


def test_no_task_changes_a_large_array_of_others(joblib: Any, three: sky.Compute) -> None:
    import numpy as np

    array = np.ones(200_000)
    tasks = (joblib.delayed(cleared)(array, number) for number in range(60))
    with pytest.raises(ValueError, match="read-only"):
        joblib.Parallel(n_jobs=-1, batch_size=20)(tasks)


def test_an_error_stops_the_tasks_that_run_and_the_next_call_works(joblib: Any, three: sky.Compute) -> None:
    tasks = [joblib.delayed(time.sleep)(600), joblib.delayed(time.sleep)(600), joblib.delayed(reciprocal)(0)]
    with pytest.raises(ZeroDivisionError) as caught:
        joblib.Parallel(n_jobs=-1, batch_size=1)(tasks)
    assert "in reciprocal" in str(caught.value.__cause__)
    assert joblib.Parallel(n_jobs=-1)(joblib.delayed(square)(each) for each in range(9)) == [
        each * each for each in range(9)
    ]


def test_a_timeout_stops_the_tasks(joblib: Any, three: sky.Compute) -> None:
    from multiprocessing import TimeoutError as Timeout

    with pytest.raises(Timeout):
        joblib.Parallel(n_jobs=-1, timeout=0.5)(joblib.delayed(time.sleep)(600) for _ in range(20))
    assert joblib.Parallel(n_jobs=-1)([joblib.delayed(square)(3)]) == [9]


def test_what_cannot_be_pickled_is_an_error(joblib: Any, three: sky.Compute) -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable):
        joblib.Parallel(n_jobs=-1)(joblib.delayed(id)(lock) for _ in range(30))
    with pytest.raises(NotPicklable):  # not one of the first, which this thread sends
        joblib.Parallel(n_jobs=-1)(joblib.delayed(id)(lock if each == 50 else each) for each in range(90))
    with pytest.raises(RemoteError, match="Stubborn"):
        joblib.Parallel(n_jobs=-1)(joblib.delayed(be_stubborn)(each) for each in range(30))
    with pytest.raises(WorkerDied):
        joblib.Parallel(n_jobs=-1)(joblib.delayed(os._exit)(3) for _ in range(5))


@pytest.mark.lab
@pytest.mark.slow
def test_a_host_is_lost_in_the_middle_of_a_thousand_tasks(joblib: Any) -> None:
    with labs.start(2, python=sys.executable) as lab:
        if lab.kind != "namespace":
            pytest.skip(lab.limits[0])
        plugins = [sky.plugins.joblib(retries=1)]
        with sky.Compute(inventory=lab.inventory, slots=2, lease=2, ui="none", plugins=plugins):
            done: list[int] = []
            parallel = joblib.Parallel(n_jobs=-1, batch_size=1, return_as="generator_unordered")
            for number in parallel(joblib.delayed(touch)("/tmp", number, 0.02) for number in range(1000)):
                done.append(number)
                if len(done) == 100:
                    lab.hosts[1].kill()
            assert len(done) == 1000


@pytest.mark.slow
def test_scikit_learn_searches_on_the_pool(joblib: Any, three: sky.Compute) -> None:
    pytest.importorskip("sklearn")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    images, labels = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(), {"C": [0.1, 1, 10], "gamma": [0.001, 0.01]}, n_jobs=-1, cv=3)
    search.fit(images, labels)
    assert search.best_score_ > 0.9 and len(search.cv_results_["params"]) == 6
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("skyfab-executor")])
