"""Hosts of a Slurm allocation: its compressed list of nodes, and what is said outside of one."""

from __future__ import annotations

import pytest

from skyfab.errors import InventoryError
from skyfab.inventory.host import Host
from skyfab.inventory.slurm import read


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("gpu1", "gpu1"),
        ("gpu[01-03,7]", "gpu01 gpu02 gpu03 gpu7"),
        ("gpu[01-03,7],login-a[1-2]b", "gpu01 gpu02 gpu03 gpu7 login-a1b login-a2b"),
        ("rack[1-2]n[08-10]", "rack1n08 rack1n09 rack1n10 rack2n08 rack2n09 rack2n10"),
        ("a,b,c[1,3,5-6]", "a b c1 c3 c5 c6"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("gpu1,gpu1", "gpu1"),
    ],
)
def test_a_list_of_nodes_means_these_hosts(nodes: str, expected: str) -> None:
    assert list(read({"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "12"}).hosts) == expected.split()


def test_the_variable_of_older_versions_is_read() -> None:
    assert read({"SLURM_NODELIST": "a[1-2]"}).hosts == {"a1": Host(name="a1"), "a2": Host(name="a2")}


def test_the_parts_of_a_heterogeneous_job_are_groups() -> None:
    environ = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST": "cpu1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "cpu1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[1-2]",
    }
    assert read(environ).groups == {"het0": ("cpu1",), "het1": ("gpu1", "gpu2")}
    with pytest.raises(InventoryError, match="HET_GROUP_1 is not set"):
        read({**environ, "SLURM_JOB_NODELIST_HET_GROUP_1": ""})


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_NODELIST": ""}])
def test_outside_of_an_allocation_there_is_a_clear_error(environ: dict[str, str]) -> None:
    with pytest.raises(InventoryError, match="not inside a Slurm allocation: SLURM_JOB_NODELIST is not set") as caught:
        read(environ)
    assert "salloc" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("gpu[1-", "invalid range in"),
        ("gpu[3-1]", "counts down"),
        ("gpu[0-99999999]", "expands to more than 10000 hosts"),
        ("n[1-9999][1-9999]", "expands to more than 10000 hosts"),
        ("a b", "not a valid host name"),
        ("-oProxyCommand=x", "not a valid host name"),
        (",,,", "has no hosts"),
    ],
)
def test_an_invalid_list_is_an_error(nodes: str, message: str) -> None:
    with pytest.raises(InventoryError, match=message):
        read({"SLURM_JOB_NODELIST": nodes})


@pytest.mark.parametrize(("job", "shown"), [({"SLURM_JOB_ID": "12"}, "slurm job 12"), ({}, "slurm")])
def test_an_error_names_the_job(job: dict[str, str], shown: str) -> None:
    with pytest.raises(InventoryError) as caught:
        read({"SLURM_JOB_NODELIST": ",,,", **job})
    assert caught.value.message == f"{shown}: has no hosts"
