"""Ctrl-C just after a run was started: it continues, and the message says how to stop it."""

from __future__ import annotations

import time

import pytest

import skyfab as sky
from skyfab.detached import find as detached
from skyfab.lab import Lab
from skyfab.pool import compute as pool

pytestmark = pytest.mark.lab


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(("module", "name"), [(detached, "_find"), (pool, "tell_files")])
def test_ctrl_c_just_after_a_launch_says_that_the_run_continues(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    def program() -> None:
        with sky.Compute("node1", inventory=lab.inventory, ui="none") as compute, monkeypatch.context() as patched:
            patched.setattr(module, name, interrupted)
            compute.launch(sky.function(time.sleep)(300), name="night")
            compute.close()

    with pytest.raises(KeyboardInterrupt) as raised:
        program()
    (run,) = [run for run in sky.runs("node1", inventory=lab.inventory) if run.state == "running"]
    said = vars(raised.value)["stopped"]
    run.stop()
    assert run.status == "stopped"
    assert said.startswith(f"the run was not stopped; to stop it: skyfab stop {run.id[:8]}")
