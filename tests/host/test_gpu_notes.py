"""What ranks on hosts note about the GPUs that they use."""

from __future__ import annotations

from typing import Any

import pytest
from stage.spot import until

import skyfab as sky


@sky.function
def uses() -> list[tuple[str, list[int], str]]:
    """The GPUs that processes on this host use, as far as this one can see: not its own."""
    from skyfab.host.gpu_locks import look

    return [(one.kind, list(one.gpus), one.run) for one in look()]


@pytest.mark.lab
def test_ranks_note_which_gpus_they_use(hosts_of: Any) -> None:
    """Each for all on the host; a rank that is alone, all GPUs. The notes end with the processes."""
    (host,) = hosts_of("openssh", 1, gpus=(3, 5))
    with sky.Compute([host], ui="none") as pool:
        uses() @ pool  # from now on, both ranks are there
        assert uses() @ pool == [[("use", [3, 5], "")]] * 2
    with sky.Compute([host], ranks=1, ui="none") as pool:
        assert uses() @ pool == [[]]
        assert uses() >> pool == [("use", [3, 5], "")]
    with sky.Compute([host], ui="none") as pool:
        assert uses() >> pool == []
        pool.submit(uses(), gpus=1).result()  # its process is kept for the next one
        assert uses() >> pool == [("use", [3], "")]


@pytest.mark.lab
def test_detached_ranks_note_the_name_of_the_run(hosts_of: Any) -> None:
    (host,) = hosts_of("openssh", 1, gpus=(0,))
    with sky.Compute([host], ui="none") as pool:
        run = pool.launch(sky.function(_wait)(), name="night")
        until(lambda: uses() >> pool == [("use", [0], "night")])
        run.stop()
        assert uses() >> pool == []


def _wait() -> None:
    import time

    time.sleep(600)
