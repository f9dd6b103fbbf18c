"""``Compute(gpus="free")``: a pool takes the GPUs that nobody uses, and others see that it has them."""

from __future__ import annotations

import os
from typing import Any

import pytest

import skyfab as sky

pytestmark = pytest.mark.lab


@sky.function
def seen() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@sky.function
def held() -> list[tuple[str, str, list[int]]]:
    """Which GPUs processes on this host hold."""
    from skyfab.host.gpu_locks import look

    return [(one.kind, str(one.uid), list(one.gpus)) for one in look()]


def test_a_pool_takes_what_is_free_and_others_see_it(hosts_of: Any) -> None:
    (ada,) = hosts_of("openssh", 1, user="ada", gpus=(0, 1))
    (root,) = hosts_of("openssh", 1, user="root", gpus=(0, 1, 2))
    with sky.Compute([ada], gpus="free", ui="none") as pool:
        assert pool.hosts[0].gpus == (0, 1)
        assert seen() >> pool == "0,1"
        with sky.Compute([root], gpus="free", ui="none") as other:
            assert other.hosts[0].gpus == (2,)
            assert other.world_size == 1
            assert seen() @ other == ["2"]
            assert other.map(sky.function(os.getenv), ["CUDA_VISIBLE_DEVICES"], gpus=1) == ["2"]
            run = other.launch(held(), name="night")
            found = run.result()
            uid = found[0][0][1] if found[0][0][2] == [0, 1] else found[0][1][1]
            assert ("hold", uid, [0, 1]) in found[0]
        assert pool.hosts[0].gpus == (0, 1)
    with sky.Compute([root], gpus="free", ui="none") as again:
        assert again.hosts[0].gpus == (0, 1, 2)


def test_a_host_without_free_gpus_says_who_holds_them(hosts_of: Any) -> None:
    hosts = hosts_of("openssh", 2, user="ada", gpus=(0, 1))
    with sky.Compute(hosts[:1], gpus="free", ui="none"):
        with pytest.raises(sky.HostUnfit, match=r"no GPU is free: in use by ada's program \(node1, 2 GPUs, ") as failed:
            sky.Compute(hosts, gpus="free", ui="none").open()
        assert failed.value.host == "node1"
        assert failed.value.hint == "choose hosts by where='gpus.free >= 1', or wait: skyfab run --when-free"
        with sky.Compute(hosts, where="gpus.free == 2", gpus="free", ui="none") as pool:
            assert [node.name for node in pool.hosts] == ["node2"]
