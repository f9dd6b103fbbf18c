"""Conditions on hosts: what they mean, and what is wrong with those that mean nothing."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyfab as sky
from skyfab.inspect.condition import Condition
from skyfab.inspect.survey import Gpu, GpuProcess, Survey

HOST = sky.Host(name="node1", tags=("a100", "fast"))
GB = 10**9
BARE = Survey(
    os="Debian GNU/Linux 12 (bookworm)",
    kernel="6",
    python="3.11.2",
    cpus=8,
    load=0.5,
    memory=64 * GB,
)
TWO = Survey(
    os="Ubuntu 24.04",
    kernel="6",
    python="3.12.3",
    cpus=8,
    load=0.5,
    gpus=(
        Gpu(index=0, name="NVIDIA A100 80GB", memory=80 * GB, memory_used=1 * GB, use=0),
        Gpu(index=1, name="NVIDIA A100 40GB", memory=40 * GB, memory_used=30 * GB, use=3),
    ),
)
USED = Survey(
    os="Ubuntu",
    kernel="6",
    python="3.12",
    cpus=8,
    load=0.5,
    gpus=(Gpu(index=0, name="H100", memory=80 * GB, memory_used=79 * GB, processes=(GpuProcess(pid=7),)),),
)


@pytest.mark.parametrize(
    ("text", "bare", "two", "used"),
    [
        ("gpu.memory >= 40GB and not busy", False, True, False),
        ("gpu.memory>40GB", False, False, True),
        ("gpu.memory >= 38 GiB", False, False, True),
        ("gpu.free >= 10GB", False, True, False),
        ("gpus == 0 or gpus >= 2", True, True, False),
        ("not gpus", True, False, False),
        ("busy", False, False, True),
        ("not not busy", False, False, True),
        ("(gpus == 0 or busy) and cpus >= 8", True, False, True),
        ("gpus == 0 or busy and cpus > 8", True, False, False),
        ("'a100' in gpu.name", False, True, False),
        ('"ubuntu" in os', False, True, True),
        ("'fast' in tags", True, True, True),
        ("'fas' in tags", False, False, False),
        ("name == 'node1'", True, True, True),
        ("memory > 1.5 kB", True, False, False),
        ("40GB <= gpu.memory", False, True, True),
        ("os > 3", False, False, False),
        ("gpu.memory != 3GB", True, True, True),
        ("load < 1", True, True, True),
        ("'slow' not in tags", True, True, True),
        ("1 <= gpus <= 1", False, False, True),
        ("'é' != name and gpu.memory >= 40GB", False, True, True),
        ("'40GB' in gpu.name", False, True, False),
        ("tags > 3", False, False, False),
        ("\tbusy\n  or  not gpus\n", True, False, True),
    ],
)
def test_what_conditions_mean(text: str, bare: bool, two: bool, used: bool) -> None:
    condition = Condition(text)
    assert [condition.fits(HOST, survey) for survey in (BARE, TWO, USED)] == [bare, two, used]


def test_gpus_are_those_of_the_inventory_and_of_the_driver() -> None:
    """As in `skyfab hosts`, also without a tool."""
    assert Condition("gpus == 1").fits(replace(HOST, gpus=(1,)), TWO)
    assert Condition("gpus == 4").fits(HOST, replace(BARE, gpu_count=4))


def test_an_unknown_use_is_no_value() -> None:
    """A GPU that is divided (MIG) does not say it."""
    gpus = (Gpu(index=0, name="H100"), Gpu(index=1, name="H100"))
    assert not Condition("gpu.use < 10").fits(HOST, replace(BARE, gpus=gpus))
    assert not Condition("gpu.use < 10").fits(HOST, replace(BARE, gpus=(replace(gpus[0], use=97), gpus[1])))


def test_processors_count_where_there_is_no_gpu() -> None:
    busy = Survey(os="x", kernel="6", python="3.11", cpus=2, load=2.5)
    assert Condition("busy").fits(HOST, busy)
    assert not Condition("busy").fits(HOST, BARE)


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("gpu.memry > 3", "unknown name 'gpu.memry'", "did you mean gpu.memory?"),
        ("colour == 3", "unknown name 'colour'", "known names: gpus, gpu.memory"),
        ("", "invalid syntax", "as in"),
        ("gpus >", "invalid syntax", "as in"),
        ("(gpus", "'(' was never closed", "as in"),
        ("gpus 3", "invalid syntax", "as in"),
        ("gpus > 3 40GB", "invalid syntax", "as in"),
        ("cpus > 4 and 40GB && busy", "invalid syntax", "as in"),
        ("gpus = 3", "invalid syntax", "compare with =="),
        ("busy is 1", "unsupported comparison: is", "compare with =="),
        ("__import__('os')", """unsupported: "__import__('os')\"""", "use and, or"),
        ("gpus > -1", "unsupported: '-1'", "use and, or"),
        ("gpus; 1", "invalid syntax", "as in"),
        ("name == 'node1", "unterminated string literal", "as in"),
        ("(" * 1000, "too many nested parentheses", "as in"),
        ("gpu.memory >= 40", "40 has no unit, and gpu.memory is a size", "write 40GB"),
        ("16 < memory", "16 has no unit", "write 16GB"),
        (5, "must be a string, not 5", "as in"),
    ],
)
def test_what_is_wrong_is_reported_before_anything_connects(text: Any, what: str, hint: str) -> None:
    with pytest.raises(sky.UsageError) as failed:
        sky.Compute("local", where=text)
    assert what in failed.value.message
    assert (failed.value.hint or "").startswith(hint)


@given(st.text(string.printable, max_size=40))
def test_any_text_is_a_condition_or_a_usage_error(text: str) -> None:
    try:
        condition = Condition(text)
    except sky.UsageError:
        return
    assert condition.fits(HOST, TWO) in (True, False)
    assert condition.values(HOST, USED) is not None
