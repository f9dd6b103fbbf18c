"""`compute.study`: Optuna's trials on hosts, with pruning, failures, GPUs and Ctrl-C. The study is in this program."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stage.spot import until

import skyfab as sky

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def pool(lent_hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    """Two hosts with two GPUs each, which have Optuna."""
    with sky.Compute(lent_hosts_of("openssh", gpus=(0, 1)), ui="none") as compute:
        yield compute


@pytest.fixture
def study() -> Any:
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=26))


def states(study: Any) -> list[str]:
    return [trial.state.name for trial in study.trials]


def parabola(trial: Any) -> float:
    x = trial.suggest_float("x", -10, 10)
    layers = trial.suggest_int("layers", 1, 8, log=True)
    kind = trial.suggest_categorical("kind", ["a", None, 3])
    trial.set_user_attr("where", (sky.instance_info().hostname, os.environ["CUDA_VISIBLE_DEVICES"]))
    assert trial.params == {"x": x, "layers": layers, "kind": kind}
    assert trial.user_attrs["where"][1] == os.environ["CUDA_VISIBLE_DEVICES"]
    trial.set_user_attr("number", trial.number)
    return (x - 2) ** 2


def test_trials_run_on_all_gpus(pool: sky.Compute, study: Any) -> None:
    ended: list[int] = []
    pool.study(study, parabola, n_trials=20, gpus=1, callbacks=[lambda study, trial: ended.append(trial.number)])
    assert states(study) == ["COMPLETE"] * 20
    assert sorted(ended) == list(range(20))
    for trial in study.trials:
        assert trial.value == (trial.params["x"] - 2) ** 2
        assert trial.user_attrs["number"] == trial.number
    assert {tuple(trial.user_attrs["where"]) for trial in study.trials} == {
        (host, gpu) for host in ("node1", "node2") for gpu in "01"
    }
    assert study.best_value < 10


def falling(trial: Any) -> float:
    import optuna

    start = trial.suggest_float("start", 0, 1)
    for step in range(10):
        trial.report(start - step / 100, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return start


def test_trials_are_pruned(pool: sky.Compute) -> None:
    pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(pruner=pruner, sampler=optuna.samplers.RandomSampler(seed=1))
    pool.study(study, falling, n_trials=20)
    assert set(states(study)) == {"COMPLETE", "PRUNED"}
    pruned = []
    for trial in study.trials:
        start, steps = trial.params["start"], len(trial.intermediate_values)
        assert trial.intermediate_values == {step: start - step / 100 for step in range(steps)}
        if trial.state.name == "PRUNED":
            pruned.append(steps)
            assert trial.value == trial.intermediate_values[steps - 1]
    assert min(pruned) < 10  # some only after their last step: which trials run beside each other varies


def test_a_failure_ends_the_study_and_all_trials(pool: sky.Compute, study: Any) -> None:
    def fails(trial: Any) -> float:
        time.sleep(0.5 if trial.number == 1 else 1000)
        raise ZeroDivisionError("of trial 1")

    with pytest.raises(ZeroDivisionError, match="of trial 1"):
        pool.study(study, fails, n_trials=20, gpus=1)
    assert states(study) == ["FAIL"] * 4
    assert sky.function(len)("four") >> pool == 4


def test_all_trials_are_stopped_and_told_of_although_the_storage_fails(
    open_pool: Callable[..., sky.Compute], study: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    tell = study.tell

    def locked(trial: Any, *arguments: Any, **options: Any) -> Any:
        told.append(trial.number)
        if trial.number in (2, 3):
            raise LookupError("database is locked")
        return tell(trial, *arguments, **options)

    def fails(trial: Any) -> None:
        time.sleep(1000 if trial.number else 0)
        raise ZeroDivisionError

    monkeypatch.setattr(study, "tell", locked)
    compute = open_pool("local", slots=4)
    with pytest.raises(LookupError, match="database is locked"):
        compute.study(study, fails, n_trials=4)
    assert sorted(told) == [0, 1, 2, 3]
    assert states(study)[:2] == ["FAIL", "FAIL"]
    assert sky.gather(*(sky.function(abs)(number) for number in range(4))) >> compute == (0, 1, 2, 3)


def test_ctrl_c_stops_the_trials(pool: sky.Compute, study: Any, lent_lab: Any) -> None:
    def endless(trial: Any) -> None:
        trial.set_user_attr("pid", os.getpid())
        trial.set_user_attr("host", sky.instance_info().hostname)
        time.sleep(1000)

    def press() -> None:
        until(lambda: sum("host" in trial.user_attrs for trial in study.trials) == 4)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.study(study, endless, n_trials=10, gpus=1)
    thread.join()
    assert states(study) == ["FAIL"] * 4
    lab_hosts = {host.name: host for host in lent_lab.hosts}
    for trial in study.trials:
        host = lab_hosts[trial.user_attrs["host"]]
        until(lambda: all(one.pid != trial.user_attrs["pid"] for one in host.processes()))  # noqa: B023


def test_mistakes(pool: sky.Compute, study: Any) -> None:
    with pytest.raises(sky.UsageError, match="3 free GPUs for"):
        pool.study(study, parabola, n_trials=1, gpus=3)
    with pytest.raises(TypeError, match=r"study\(\) got an unexpected keyword argument 'wrong'"):
        pool.study(study, parabola, n_trials=1, wrong=1)  # type: ignore[call-arg]
    assert study.trials == []
    lock = threading.Lock()
    with pytest.raises(sky.NotPicklable):
        pool.study(study, lambda trial: lock, n_trials=5)
    assert states(study) == ["FAIL"]


def test_untrusted_hosts_cannot_call_this_program(study: Any, open_pool: Callable[..., sky.Compute]) -> None:
    compute = open_pool("local", results="data")
    with pytest.raises(sky.UsageError, match='objects of this program with results="data"'):
        compute.study(study, lambda trial: 1.0, n_trials=1)
