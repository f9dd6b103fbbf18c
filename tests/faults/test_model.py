"""Random operations from several threads against a model of what must happen, whatever happens meanwhile.

The seed is printed; ``SKYFAB_MODEL_SEED=…`` sets it, and ``SKYFAB_MODEL_SECONDS=…`` how long the soak takes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cable
import model
import model_world
import pytest
from stage import labs, remains, traces
from stage.spot import Spot

import skyfab as sky
from skyfab.lab import Lab, LabHost

pytestmark = pytest.mark.lab

SMALL_DISK = "/small"
MEGABYTES = 300
LEASE = 30.0


@pytest.fixture
def seed() -> int:
    found = int(os.environ.get("SKYFAB_MODEL_SEED") or secrets.randbits(32))
    print(f"SKYFAB_MODEL_SEED={found}")
    return found


@contextmanager
def small_disk(host: LabHost) -> Iterator[None]:
    host.small_disk(SMALL_DISK, MEGABYTES)
    yield
    host.run(["umount", SMALL_DISK])


def hosts_of(lab: Lab, names: Sequence[str], transport: str, **changes: Any) -> list[sky.Host]:
    found = sky.Inventory.of(lab.inventory).hosts
    return [replace(found[name], transport=transport, user="root", slots=2, **changes) for name in names]


@contextmanager
def subject(lab: Lab, folder: Path, seed: int, *, has_torch: bool) -> Iterator[model.Model]:
    """Three pools: two processes each on this machine's two hosts, two hosts of the lab, and one with a small disk."""
    code = folder / "code"
    code.mkdir()
    (code / "edited_code.py").touch()
    options: dict[str, Any] = {"image": sky.Image(includes=[str(code)]), "lease": LEASE, "ui": "none"}
    here = [
        sky.Host(name=f"here{number}", transport="local", cache=str(folder / f"cache{number}"), slots=2)
        for number in (1, 2)
    ]
    there = hosts_of(lab, ["node1", "node2"], "openssh")
    tight = hosts_of(lab, ["node3"], "fabric", cache=f"{SMALL_DISK}/cache")
    spot = Spot(lab.hosts)
    with small_disk(lab["node3"]):
        yield model.Model(
            [
                model.Pool("near", sky.Compute(here, ranks=2, **options), ("here1", "here2"), {}),
                model.Pool(
                    "far",
                    sky.Compute(there, ranks=1, **options),
                    ("node1", "node2"),
                    {name: lab[name] for name in ("node1", "node2")},
                    has_torch=has_torch,
                ),
                model.Pool(
                    "tight",
                    sky.Compute(tight, ranks=2, **options),
                    ("node3",),
                    {"node3": lab["node3"]},
                    small_disk=SMALL_DISK,
                ),
            ],
            folder,
            spot / "",
            seed,
        )
    spot.close()


def left_on(host: LabHost) -> set[str]:
    cache = host.path(f"{SMALL_DISK}/cache")
    return remains.on(host) | {f"{host.name}: {path}" for path in cache.glob("run/*/*")}


def discard(host: LabHost, subject: model.Model) -> None:
    """What docs/reliability.md says may be left, until the next pool or gc takes it.

    An agent that was killed leaves what was on its way to it, and one of a host that was rebooted its folder too.
    """
    if host.name not in subject.killed | subject.rebooted:
        return
    for cache in remains.caches(host):
        folders = cache.glob("run/*/*") if host.name in subject.rebooted else ()
        for left in (*cache.glob("blobs/.*"), *cache.glob("trees/.*"), *folders):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def check(subject: model.Model, lab: Lab, *, seconds: float, workers: int) -> None:
    try:
        for pool in subject.pools:
            pool.compute.open()
        model_world.run(subject, workers=workers, seconds=seconds)
    finally:
        for pool in subject.pools:
            pool.compute.close()
    looks = [lambda host=host: traces.on(host) for host in lab.hosts]  # type: ignore[misc]
    traces.left(looks, timeout=LEASE + 20)  # a run whose launch was interrupted ends with its lease
    for host in lab.hosts:
        discard(host, subject)
    looks = [lambda: traces.here(subject.folder), *(lambda host=host: left_on(host) for host in lab.hosts)]  # type: ignore[misc]
    if left := traces.left(looks):
        subject.report.broken("left", f"{sorted(left)}")
    assert not subject.report.count(), f"SKYFAB_MODEL_SEED={subject.seed}\n{subject.report}"


def test_random_operations_from_several_threads_keep_every_promise(lab: Lab, tmp_path: Path, seed: int) -> None:
    with subject(lab, tmp_path, seed, has_torch=False) as made:
        check(made, lab, seconds=4, workers=3)


@pytest.fixture
def lent() -> Iterator[Lab]:
    """Hosts that have what this program can import, numpy and torch."""
    pytest.importorskip("torch")
    with labs.start(3, python=sys.executable) as lab:
        cable.settle(lab.hosts)
        yield lab


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_minutes_of_random_operations_keep_every_promise(lent: Lab, tmp_path: Path, seed: int) -> None:
    with subject(lent, tmp_path, seed, has_torch=True) as made:
        check(made, lent, seconds=float(os.environ.get("SKYFAB_MODEL_SECONDS") or 600), workers=4)
