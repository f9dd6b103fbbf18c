"""Random operations from several threads against a model of what must happen, whatever happens meanwhile.

The seed is printed; ``SKYFAB_MODEL_SEED=…`` sets it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import model
import pytest
from stage import remains, traces

import skyfab as sky
from skyfab.lab import Lab

pytestmark = pytest.mark.lab


@pytest.fixture
def seed() -> int:
    found = int(os.environ.get("SKYFAB_MODEL_SEED") or secrets.randbits(32))
    print(f"SKYFAB_MODEL_SEED={found}")
    return found


@pytest.fixture
def subject(lab: Lab, hosts_of: Callable[..., list[sky.Host]], tmp_path: Path, seed: int) -> model.Model:
    """Two pools: two processes each on this machine's two hosts, and two hosts of the lab."""
    code = tmp_path / "code"
    code.mkdir()
    image = sky.Image(includes=[str(code)])
    (code / "edited_code.py").touch()
    here = [
        sky.Host(name=f"here{number}", transport="local", cache=str(tmp_path / f"cache{number}"), slots=2)
        for number in (1, 2)
    ]
    there = hosts_of("openssh", 2, slots=2)
    near = sky.Compute(here, ranks=2, image=image, ui="none")
    far = sky.Compute(there, ranks=1, image=image, ui="none")
    pools = [
        model.Pool("near", near, ("here1", "here2"), {}),
        model.Pool("far", far, ("node1", "node2"), {host.name: host for host in lab.hosts[:2]}),
    ]
    return model.Model(pools, code, seed)


def discard_drafts(lab: Lab, names: set[str]) -> None:
    """Agents that were killed leave what was on its way to them; gc takes that after a day."""
    for cache in (cache for host in lab.hosts if host.name in names for cache in remains.caches(host)):
        for draft in (*cache.glob("blobs/.*"), *cache.glob("trees/.*")):
            shutil.rmtree(draft) if draft.is_dir() else draft.unlink()


def check(subject: model.Model, lab: Lab, tmp_path: Path, *, operations: int, seconds: float) -> None:
    try:
        for pool in subject.pools:
            pool.compute.open()
        model.run(subject, operations=operations, workers=4, seconds=seconds)
    finally:
        for pool in subject.pools:
            pool.compute.close()
    discard_drafts(lab, subject.killed)
    left = remains.after(lab.hosts, seconds=15) | traces.left([lambda: traces.here(tmp_path)])
    if left:
        subject.report.broken("left", f"{sorted(left)}")
    assert not subject.report.count(), f"SKYFAB_MODEL_SEED={subject.seed}\n{subject.report}"


@pytest.mark.slow
def test_random_operations_from_several_threads_keep_every_promise(
    subject: model.Model, lab: Lab, tmp_path: Path
) -> None:
    check(subject, lab, tmp_path, operations=2000, seconds=15)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_random_operations_from_several_threads_keep_every_promise(
    subject: model.Model, lab: Lab, tmp_path: Path
) -> None:
    check(subject, lab, tmp_path, operations=10_000, seconds=3000)
