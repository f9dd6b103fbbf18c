"""Dask on this machine: GPUs, options and their errors, and that threads and children of this program end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

import skyfab as sky

distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.timeout(120)


def names(client: Any) -> set[str]:
    return {worker["name"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()}


@pytest.mark.slow
def test_dask_runs_on_this_machine_and_ends(open_pool: Callable[..., sky.Compute]) -> None:
    compute = open_pool("local")
    with compute.dask() as client:
        assert client.submit(sum, [1, 2]).result() == 3
        assert distributed.default_client() is client
        assert names(client) == {"here1"}
        (pid,) = client.run(os.getpid).values()
    assert client.status == "closed"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with compute.dask(threads=3) as client:  # again, in the same pool
        assert list(client.nthreads().values()) == [3]


@pytest.mark.slow
def test_each_gpu_has_a_worker(open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed.Client, "wait_for_workers")  # it would never see those of a host that was lost
    compute = open_pool("local", host={"gpus": (4, 6)})

    def visible() -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    with compute.dask() as client:
        assert names(client) == {"here1-0", "here1-1"}
        futures = client.map(lambda _: visible(), range(8), resources={"GPU": 1}, pure=False)
        assert set(client.gather(futures)) <= {"4", "6"}
        assert sorted(client.run(visible).values()) == ["4", "6"]
    with compute.dask(workers=1) as client:
        (worker,) = client.scheduler_info()["workers"].values()
        assert worker["resources"] == {"GPU": 2}
        assert list(client.run(visible).values()) == ["4,6"]


@pytest.mark.parametrize("options", [{"workers": 0}, {"threads": 1.5}])
def test_invalid_options_are_refused(open_pool: Callable[..., sky.Compute], options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(sky.UsageError, match=f"invalid {name}="):
        with open_pool("local").dask(**options):
            pass


def test_hosts_that_are_not_trusted_have_no_dask(open_pool: Callable[..., sky.Compute]) -> None:
    with pytest.raises(sky.UsageError, match="unpickles"):
        open_pool("local", results="data").dask()


def test_dask_is_needed_here_too(open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch) -> None:
    compute = open_pool("local")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(sky.UsageError, match=r"not installed on this machine.*\n.*uv pip install dask distributed"):
        with compute.dask():
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("skyfab-dask")]
