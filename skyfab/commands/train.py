"""The main job: a small digit classifier goes out untrained, is trained on every rank, comes back: `skyfab train`."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import skyfab
from skyfab.compute import Compute
from skyfab.errors import BroadcastError, RemoteTraceback, UsageError
from skyfab.calls import as_function
from skyfab.image import Image
from skyfab.ui import table


def train(hosts: str | None, inventory: str | None, *, epochs: int, ranks: int | None) -> None:
    """Trains on every rank of the hosts, or on two ranks of this machine, and prints how well."""
    started = time.monotonic()
    digits = _example()
    data = digits.load()
    model = _untrained(digits, data)
    before = digits.evaluate(model, data.x_test, data.y_test)
    print(f"{len(data.y_train)} handwritten digits to learn from, {len(data.y_test)} held out", flush=True)
    print(f"untrained, the model reads {_percent(before)} of those right", flush=True)

    opening = time.monotonic()
    with _pool(hosts, inventory, ranks, digits) as compute:
        calling = time.monotonic()
        print(f"training on {_ranks(compute)}: the first epoch waits for torch", flush=True)
        places, trained = _trained(compute, model, data, epochs)
        trained_at = time.monotonic()

    combined = digits.average([rank.model for rank in trained]) if len(trained) > 1 else trained[0].model
    after = digits.evaluate(combined, data.x_test, data.y_test)
    rows = [
        (str(rank), place, f"{one.history[-1].loss:.3f}", _percent(one.history[-1].accuracy))
        for rank, (place, one) in enumerate(zip(places, trained, strict=True))
    ]
    table(("rank", "host", "loss", "accuracy"), rows, right=("rank", "loss", "accuracy"))
    print(f"evaluated here: {_percent(before)} before, {_percent(after)} after")
    spent = f"connect {calling - opening:.1f} s, train {trained_at - calling:.1f} s"
    print(f"{spent}, {time.monotonic() - started:.1f} s in all")


def _example() -> Any:
    """The module of the example: a folder of the checkout, or of the installed package."""
    package = Path(skyfab.__file__).resolve().parent
    folder = next(
        (place for place in (package / "examples/digits", package.parent / "examples/digits") if place.is_dir()), None
    )
    if folder is None:
        raise UsageError("the digits example is missing from this installation", hint="install skyfab again")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("digits")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"training needs {error.name}, which is not installed here",
            hint="./inv train sets everything up in a checkout; elsewhere: pip install 'skyfab[torch]'",
        ) from None


def _ranks(compute: Compute) -> str:
    ranks = f"{compute.world_size} rank{'s' if compute.world_size > 1 else ''}"
    names = [node.name for node in compute.hosts]
    return f"{ranks} of {names[0] if len(names) == 1 else f'{len(names)} hosts'}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _untrained(digits: Any, data: Any) -> Any:
    import torch

    torch.manual_seed(0)  # the same start every time: results can be compared
    return digits.Classifier(data.x_train.shape[1])


def _pool(hosts: str | None, inventory: str | None, ranks: int | None, digits: Any) -> Compute:
    # Only the example's module goes along, wherever it is installed and whatever else is loaded here.
    image = Image(includes=(digits.__file__,), excludes=("*", "!/digits.py"))
    if hosts is None and inventory is None:
        return Compute("local", ranks=ranks or 2, image=image)
    return Compute(hosts, inventory=inventory, ranks=ranks or "auto", image=image)


def _trained(compute: Compute, model: Any, data: Any, epochs: int) -> tuple[list[str], list[Any]]:
    """For each rank its host's name and what training gave."""

    def run(model: Any, x: Any, y: Any, epochs: int) -> tuple[int, Any]:  # travels by value
        import importlib

        import skyfab as sky

        return sky.instance_info().node, importlib.import_module("digits").train(model, x, y, epochs)

    try:
        results = compute.broadcast(as_function(run)(model, data.x_train, data.y_train, epochs))
    except BroadcastError as error:
        error.hint = _missing(error.exceptions[0])
        raise
    return [compute.hosts[node].name for node, _ in results], [one for _, one in results]


def _missing(error: Exception) -> str | None:
    """What to do about a host without torch."""
    cause = error.__cause__
    if not isinstance(error, ModuleNotFoundError) or not isinstance(cause, RemoteTraceback):
        return None
    where = f'python = "/path/on/{cause.host}/bin/python" under [hosts.{cause.host}] in the inventory'
    return f"name an interpreter there that has {error.name}: {where}"
