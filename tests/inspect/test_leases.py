"""Who holds and who waits for GPUs, as `hosts`, `top` and conditions show it, and which GPUs a rank uses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from skyfab._util import schema
from skyfab.host import gpu_locks
from skyfab.inspect.columns import cells
from skyfab.inspect.condition import Condition
from skyfab.inspect.survey import LIMITS, Survey
from skyfab.inventory.host import Host

HOST = Host(name="node1", gpus=(0, 1, 2))
NIGHT: dict[str, Any] = {
    "user": "ada",
    "run": "night",
    "gpus": [0, 1],
    "waits": False,
    "seconds": 10_800.0,
    "text": "ada's night (node1, 2 GPUs, 3 h so far)",
}


def surveyed(*leases: dict[str, Any]) -> Survey:
    said = {"os": "Debian", "kernel": "6", "python": "3.11", "cpus": 4, "leases": list(leases)}
    return schema.parse(Survey, said, LIMITS)


def test_hosts_shows_owner_run_and_since_when() -> None:
    waits = {**NIGHT, "waits": True, "text": "bob's x (node1, 3 GPUs, 1 min so far, low priority)"}
    shown = cells(surveyed(NIGHT, waits), 3)[-2]
    assert shown.endswith(f"; {NIGHT['text']}; 1 waiting, first {waits['text']}")


def test_conditions_know_which_gpus_are_free() -> None:
    free, held = surveyed(), surveyed(NIGHT)
    waited_for = surveyed(NIGHT, {**NIGHT, "waits": True, "gpus": [0, 1, 2]})
    assert [Condition("gpus.free >= 1").fits(HOST, one) for one in (free, held, waited_for)] == [True, True, False]
    assert [Condition("gpus.free == 3").fits(HOST, one) for one in (free, held)] == [True, False]
    assert [Condition("busy").fits(HOST, one) for one in (free, held)] == [False, True]
    busy = {"index": 2, "name": "H100", "processes": [{"pid": 7}]}
    both = dataclasses.replace(held, gpus=schema.parse(Survey, {**_said(), "gpus": [busy]}, LIMITS).gpus)
    assert both.free_gpus(HOST) == 0
    assert Condition("gpus.free").values(HOST, held) == "gpus.free 1"


def _said() -> dict[str, Any]:
    return {"os": "Debian", "kernel": "6", "python": "3.11", "cpus": 4}


@pytest.mark.parametrize("bad", [{"gpus": "all"}, {"waits": "yes"}, {"seconds": "long"}, {"user": 7}])
def test_leases_that_a_host_invents_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(schema.Invalid):
        surveyed({**NIGHT, **bad})


def test_what_a_rank_was_started_with_says_which_gpus_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[list[int], str]] = []
    monkeypatch.setattr(gpu_locks, "note_use", lambda gpus, run: noted.append((list(gpus), run)))
    (tmp_path / "about").write_text(json.dumps({"name": "night"}))
    info = {"accelerators": 3, "local_rank": 0, "local_world_size": 2}
    gpu_locks.note_rank({"env": {}, "info": info, "run": str(tmp_path)})
    gpu_locks.note_rank({"env": {"CUDA_VISIBLE_DEVICES": "4,6"}, "info": info, "run": ""})
    gpu_locks.note_rank({"env": {}, "info": {**info, "local_world_size": 1}, "run": ""})
    gpu_locks.note_rank({"env": {}, "info": {**info, "local_rank": 1}, "run": ""})
    gpu_locks.note_rank({"env": {gpu_locks.QUEUED: "1"}, "info": info, "run": ""})
    gpu_locks.note_rank({"env": {"CUDA_VISIBLE_DEVICES": "GPU-8a,"}, "info": info, "run": "/none"})
    assert noted == [([0, 1], "night"), ([4, 6], ""), ([0, 1, 2], ""), ([0, 1], "")]
