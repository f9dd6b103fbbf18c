"""The other plugins at work: what a function finds. Where a framework is not installed, its own tests are left out."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ui.events import Event


@pytest.fixture(scope="module")
def lab(lent_lab: Lab) -> Lab:
    """Hosts need the frameworks, at once."""
    return lent_lab


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@sky.function
def environment(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


@sky.function
def devices() -> tuple[int, int, int, list[float]]:
    import jax
    import numpy
    from jax.experimental import multihost_utils

    everyones = multihost_utils.process_allgather(numpy.array([jax.process_index() + 1.0]))
    return jax.process_index(), jax.process_count(), len(jax.devices()), everyones.ravel().tolist()


@sky.function
def processes() -> int:
    import jax

    return jax.process_count()


@sky.function
def backend() -> str:
    import keras

    return str(keras.backend.backend())


@sky.function
def accelerator() -> tuple[int, int, str, float]:
    import torch
    from accelerate import Accelerator

    found = Accelerator()
    everyones: Any = found.reduce(torch.ones(1, device=found.device))
    return found.num_processes, found.process_index, str(found.mixed_precision), everyones.item()


# ---- jax


@pytest.fixture
def misled(namespaces: Lab) -> Iterator[None]:
    """Hosts whose own names lead to loopback, as Debian's installer writes them, or nowhere."""
    kept = {name: namespaces[name].run(["cat", "/etc/hosts"]).stdout for name in ("node1", "node2")}
    write = "printf '%s' \"$1\" > /etc/hosts"
    namespaces["node1"].run(["sh", "-c", write, "-", "127.0.0.1 localhost\n"])
    namespaces["node2"].run(["sh", "-c", write, "-", "127.0.0.1 localhost\n127.0.1.1 node2\n"])
    yield
    for name, text in kept.items():
        namespaces[name].run(["sh", "-c", write, "-", text])


@needs("jax")
@pytest.mark.lab
@pytest.mark.slow
def test_jax_is_one_runtime_over_all_ranks_and_needs_no_names_of_hosts(
    misled: None, open_pool: Callable[..., sky.Compute]
) -> None:
    """The collectives take the interface that leads to the others: one host's CPU really adds to the other's."""
    pool = open_pool("openssh", 2, ranks=1, plugins=[sky.plugins.jax()])
    for _ in range(2):
        assert devices() @ pool == [(0, 2, 2, [1.0, 2.0]), (1, 2, 2, [1.0, 2.0])]
    assert processes() >> pool == 1


@needs("jax")
@pytest.mark.slow
def test_a_rank_of_jax_can_fail_and_be_stopped(open_pool: Callable[..., sky.Compute]) -> None:
    """Its exception is the first, the others go when told to, and the next call has a runtime again."""
    pool = open_pool(ranks=2, plugins=[sky.plugins.jax()])
    assert catches_sigterm() @ pool == [False, False]
    with pytest.raises(sky.BroadcastError) as raised:
        uneven() @ pool
    assert isinstance(raised.value.exceptions[0], LookupError)
    assert [found[:2] for found in devices() @ pool] == [(0, 2), (1, 2)]


@sky.function
def catches_sigterm() -> bool:
    """Whether anything in this process does, C++ included."""
    import jax

    jax.devices()
    status = Path("/proc/self/status")
    if not status.exists():
        return False
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@sky.function
def uneven() -> None:
    import jax
    import numpy
    from jax.experimental import multihost_utils

    if jax.process_index() == 1:
        raise LookupError("lost its way")
    multihost_utils.process_allgather(numpy.ones(1))


# ---- keras


@needs("keras", "torch")
@pytest.mark.slow
def test_keras_runs_on_its_backend(open_pool: Callable[..., sky.Compute]) -> None:
    assert backend() @ open_pool(ranks=1, plugins=[sky.plugins.keras(backend="torch")]) == ["torch"]


# ---- hugging face


def test_the_token_reaches_the_processes_and_nothing_else(open_pool: Callable[..., sky.Compute]) -> None:
    secret = "hf_do-not-show"
    pool = open_pool(ranks=2, plugins=[sky.plugins.huggingface(token=secret)])
    events: list[Event] = []
    pool.events.subscribe(events.append)
    assert environment("HF_TOKEN") @ pool == [{"HF_TOKEN": secret}] * 2
    assert environment("HF_TOKEN") >> pool == {"HF_TOKEN": secret}
    assert events
    assert secret not in "".join(f"{event} {event!r}" for event in events)
    assert commands_with(secret) >> pool == []
    assert "HF_TOKEN" not in os.environ


@sky.function
def commands_with(secret: str) -> list[str]:
    """The processes of this machine that were started with it, on their command line or in their environment."""
    found = []
    for file in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        try:
            if secret.encode() in file.read_bytes():
                found.append(str(file))
        except OSError:
            pass  # it has ended, or is somebody else's
    return found


# ---- accelerate


@needs("accelerate", "torch")
@pytest.mark.slow
def test_accelerate_joins_the_process_group(open_pool: Callable[..., sky.Compute]) -> None:
    pool = open_pool(ranks=2, plugins=[sky.plugins.torch(), sky.plugins.accelerate({"mixed_precision": "bf16"})])
    assert accelerator() @ pool == [(2, 0, "bf16", 2.0), (2, 1, "bf16", 2.0)]
