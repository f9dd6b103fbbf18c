"""Optuna's trials on the hosts of a pool. The study stays in this program, which answers what objectives ask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.calls.call import as_function
from skyfab.calls.results import add_note
from skyfab.calls.stream import Offered
from skyfab.errors import HostLost
from skyfab.host.agent.actors import RemoteHandle

if TYPE_CHECKING:
    import optuna

_VALUES: Final = ("number", "params", "distributions", "user_attrs", "system_attrs", "datetime_start")
"""Attributes of a trial that are not methods."""


class HostTrial(RemoteHandle):
    """The trial of an objective on a host: a handle, whose calls of `suggest_float`, `report` … this program makes."""

    def __getattr__(self, name: str) -> Any:
        return self._method("__getattribute__")(name) if name in _VALUES else super().__getattr__(name)


def run_trials(
    pool: Any,
    study: optuna.Study,
    objective: Callable[[Any], Any],
    *,
    n_trials: int,
    gpus: float | None,
    catch: tuple[type[Exception], ...],
    callbacks: Sequence[Callable[[optuna.Study, Any], None]],
) -> None:
    """Runs trials, as many at a time as fit. What has not ended at Ctrl-C, or if one raises, is stopped and fails."""
    fn, left = as_function(objective), iter(range(n_trials))
    slots = pool.executor(fn.gpus if gpus is None else gpus).slots
    running: dict[optuna.Trial, Future[Any]] = {}
    study._stop_flag, study._thread_local.in_optimize_loop = False, True  # as `optimize` does, for `study.stop()`
    try:
        while True:
            for _ in itertools.islice(left, slots - len(running)):
                with SIGNAL_GUARD:  # a trial that was asked for is known here, so that it ends
                    trial = study.ask()
                    running[trial] = Future()
                    running[trial] = pool.submit(fn(Offered(trial, HostTrial)), gpus=gpus)
            if not running:
                return
            with pool.events.waiting:
                wait(running.values(), return_when=FIRST_COMPLETED)
            for trial, future in [one for one in running.items() if one[1].done()]:
                error = future.exception()
                with SIGNAL_GUARD:
                    ended = _tell(study, trial, future)
                    del running[trial]
                caught = catch if all(node.lost for node in pool.hosts) else (*catch, HostLost)
                if error is not None and not _is_pruned(error) and not isinstance(error, caught):
                    add_note(error, f"in the study: trial {ended.number}, {ended.params}")
                    raise error
                for callback in callbacks:
                    callback(study, ended)
                if study._stop_flag:
                    left = iter(())
    finally:
        study._thread_local.in_optimize_loop = False
        with ExitStack() as last:  # makes all of these calls, also after one has raised
            for trial, future in running.items():
                last.callback(_tell, study, trial, future)
            for future in running.values():
                future.cancel()


def _tell(study: optuna.Study, trial: optuna.Trial, future: Future[Any]) -> optuna.trial.FrozenTrial:
    """Tells the study how a trial ended. One that was stopped fails."""
    from optuna.trial import TrialState

    if future.cancelled():
        return study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
    if (error := future.exception()) is None:
        return study.tell(trial, future.result(), skip_if_finished=True)
    return study.tell(trial, state=TrialState.PRUNED if _is_pruned(error) else TrialState.FAIL, skip_if_finished=True)


def _is_pruned(error: BaseException) -> bool:
    from optuna import TrialPruned

    return isinstance(error, TrialPruned)
