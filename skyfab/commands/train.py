"""The main job: a small digit classifier goes out untrained, is trained on every rank, comes back: `skyfab train`."""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import skyfab
from skyfab.calls import Call, as_function
from skyfab.compute import Compute
from skyfab.errors import BroadcastError, RemoteTraceback, UsageError
from skyfab.image import Image
from skyfab.ui import table


def train(hosts: str | None, inventory: str | None, *, epochs: int, ranks: int | None) -> None:
    """Trains on every rank of the hosts, or on two ranks of this machine, and prints how well."""
    started = time.monotonic()
    folder = _example()
    if hosts is None and inventory is None:
        hosts, ranks = "local", ranks or 2
    pool = _pool(hosts, inventory, ranks, folder)  # a mistake in the inventory shows before torch has loaded
    digits = _imported(folder)
    data = digits.load()
    model = _untrained(digits, data)
    before = digits.evaluate(model, data.x_test, data.y_test)
    _say(f"{len(data.y_train)} handwritten digits to learn from, {len(data.y_test)} held out")
    _say(f"untrained, the model reads {_percent(before)} of those right")

    opening = time.monotonic()
    with pool as compute:
        calling = time.monotonic()
        _say(f"training on {_counted(compute.world_size, 'rank')} of {_counted(len(compute.hosts), 'host')}")
        trained = _broadcast(compute, as_function(digits.train)(model, data.x_train, data.y_train, epochs))
        done = time.monotonic()
        places = [node.name for node in compute.hosts for _ in range(ranks or max(1, len(node.gpus)))]

    model = digits.average([rank.model for rank in trained])
    after = digits.evaluate(model, data.x_test, data.y_test)
    _table([rank.history[-1] for rank in trained], places)
    _say(f"evaluated here: {_percent(before)} before, {_percent(after)} after")
    _say(f"connect {calling - opening:.1f} s, train {done - calling:.1f} s, {time.monotonic() - started:.1f} s in all")


def _example() -> Path:
    """The example's folder, in the installed package or in the checkout."""
    package = Path(skyfab.__file__).resolve().parent
    for folder in (package / "examples" / "digits", package.parent / "examples" / "digits"):
        if (folder / "digits.py").exists():
            return folder
    raise UsageError("the digits example is missing from this installation", hint="install skyfab again")


def _pool(hosts: str | None, inventory: str | None, ranks: int | None, folder: Path) -> Compute:
    # Only the example's module goes along, wherever it is installed and whatever else is loaded here.
    image = Image(includes=(str(folder / "digits.py"),), excludes=("*", "!/digits.py"))
    pool = Compute(hosts, inventory=inventory, ranks=ranks or "auto", image=image)
    if all(host.transport == "local" or host.python != "auto" for host in pool.selected):
        return pool  # interpreters that somebody has chosen have what it takes
    return Compute(hosts, inventory=inventory, ranks=ranks or "auto", image=replace(image, pip=_torch()))


def _torch() -> tuple[str, ...]:
    """What hosts need: torch as it is here."""
    try:
        found = version("torch").partition("+")[0]
    except PackageNotFoundError:
        return ()  # said in a moment, where it is needed first
    return (f"torch=={found}", "numpy")


def _imported(folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("digits")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"training needs {error.name}, which is not installed here",
            hint="./inv train sets everything up in a checkout; elsewhere: pip install 'skyfab[torch]'",
        ) from None


def _untrained(digits: Any, data: Any) -> Any:
    import torch

    torch.manual_seed(0)  # the same start every time: results can be compared
    return digits.Classifier(data.x_train.shape[1])


def _broadcast(compute: Compute, call: Call[Any]) -> list[Any]:
    try:
        return call @ compute
    except BroadcastError as error:
        first, cause = error.exceptions[0], error.exceptions[0].__cause__
        if isinstance(first, ModuleNotFoundError) and first.name == "torch" and isinstance(cause, RemoteTraceback):
            error.hint = f'give [hosts.{cause.host}] of the inventory a python = "/path" that has torch'
        raise


def _table(epochs: list[Any], places: list[str]) -> None:
    rows = [
        (str(rank), place, f"{epoch.loss:.3f}", _percent(epoch.accuracy))
        for rank, (place, epoch) in enumerate(zip(places, epochs, strict=True))
    ]
    table(("rank", "host", "loss", "accuracy"), rows, right=("rank", "loss", "accuracy"))


def _say(text: str) -> None:
    print(text, flush=True)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
