"""`skyfab train`: a demo: sends a small digit classifier to hosts, trains it on all ranks (DDP) and evaluates it."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from skyfab._util.sizes import counted
from skyfab.cli.command import Detach, Hosts, InventoryFile, Option, Ranks, command
from skyfab.cli.run_options import ImageOptions, Index
from skyfab.errors import UsageError

_say: Final = functools.partial(print, flush=True)


@command
def train(
    hosts: Hosts = None,
    inventory: InventoryFile = None,
    epochs: Annotated[int, Option("the number of passes over the data", "N")] = 10,
    ranks: Ranks = None,
    index: Index = (),
    detach: Detach = False,
) -> None:
    """Train a digit classifier on hosts or on this machine.

    Builds the model on this machine, trains it on all ranks together (DDP), each with its share of the data, brings it
    back and evaluates it. Without hosts and inventory, two ranks run on this machine.

        skyfab train
        skyfab train node1 node2 --epochs=20
        skyfab train --hosts=gpu --inventory=lab.toml --ranks=2
        skyfab train --hosts=gpu --index=https://download.pytorch.org/whl/cu126=torch
        skyfab train --hosts=gpu --epochs=500 --detach
    """
    from skyfab import plugins
    from skyfab.calls.call import as_function
    from skyfab.cli.detach import broadcast, tell_how_to_attach
    from skyfab.cli.host_selection import selected
    from skyfab.detached.run import Run
    from skyfab.pool.compute import Compute

    started = time.monotonic()
    found, chosen = selected(hosts, inventory)
    if hosts is None and found.source is None:
        ranks = ranks or 2
    image = replace(ImageOptions(index=index).image(), excludes=("*",))  # hosts need nothing of this folder
    # Raises for a mistake in the inventory before torch is imported.
    pool = Compute(
        chosen, inventory=found, ranks=ranks or "auto", image=image, plugins=[plugins.torch()], workdir="temp"
    )
    digits = _digits()
    data = digits.load()
    model = digits.untrained()
    before = digits.evaluate(model, data.x_test, data.y_test)
    _say(f"{len(data.y_train)} handwritten digits to learn from, {len(data.y_test)} held out")
    _say(f"before training, the model classifies {_percent(before)} of those correctly")

    opening = time.monotonic()
    with pool as compute:
        calling = time.monotonic()
        _say(f"training on {counted(compute.world_size, 'rank')} of {counted(len(compute.hosts), 'host')}")
        call = as_function(digits.train)(model, data.x_train, data.y_train, epochs)
        trained = compute.launch(call, name="train") if detach else broadcast(compute, call, name="train")
        done = time.monotonic()
    if isinstance(trained, Run):
        tell_how_to_attach(trained)
        return

    model = trained[0].model  # the same on all ranks
    after = digits.evaluate(model, data.x_test, data.y_test)
    _plot(trained[0].history)
    _say(f"evaluated locally: {_percent(before)} before, {_percent(after)} after")
    _say(f"connect {calling - opening:.1f} s, train {done - calling:.1f} s, {time.monotonic() - started:.1f} s total")


def _digits() -> Any:
    try:
        from skyfab.demo import digits
    except ModuleNotFoundError as error:
        raise UsageError(
            f"training needs {error.name}, which is not installed on this machine",
            hint="./inv train sets everything up in a checkout; elsewhere: pip install 'skyfab[torch]'",
        ) from None
    return digits


def _plot(history: Sequence[Any]) -> None:
    """Prints loss and accuracy as bar charts, a column for each epoch."""
    from skyfab.ui.screen import columns

    for name, values, last in (
        ("loss", [epoch.loss for epoch in history], f"{history[-1].loss:.3f}"),
        ("accuracy", [epoch.accuracy for epoch in history], _percent(history[-1].accuracy)),
    ):
        _say(f"{name:<8} {columns(values)} {last}")


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"
