"""Plugin for pytest: fixtures with hosts of a lab, for tests of programs that use several machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from subprocess import CalledProcessError
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from skyfab.lab import Lab, LabHost


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "number of hosts of the fixture skyfab_lab (default: 2)"
    parser.addini("skyfab_lab_count", about, default="2")
    parser.getgroup("skyfab").addoption("--skyfab-lab-count", type=int, metavar="N", help=about)


@pytest.fixture(scope="session")
def skyfab_lab(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Iterator[Lab]:
    """Hosts node1, node2 … for the whole run: a `skyfab.lab.Lab`, whose `inventory` is the path of their inventory.

    Set their number with ``--skyfab-lab-count``, or ``skyfab_lab_count`` in the configuration. If no lab can be
    started, tests are skipped.
    """
    from skyfab.calls.call import BY_VALUE
    from skyfab.errors import UsageError
    from skyfab.lab import Lab, root
    from skyfab.protocol.codec import send_by_value

    count = int(pytestconfig.getoption("skyfab_lab_count") or pytestconfig.getini("skyfab_lab_count"))
    try:
        made = Lab.start(count, python=root.python_to_lend())
    except UsageError as error:
        pytest.skip(f"no lab can be started: {error}")
    for item in request.session.items:  # hosts have no pytest, which modules of tests import
        if isinstance(item, pytest.Function) and "skyfab_lab" in item.fixturenames:
            BY_VALUE.add(item.module.__name__)
            send_by_value(item.module)
    with made:
        yield made


@pytest.fixture
def skyfab_lab_hosts(skyfab_lab: Lab) -> Iterator[Sequence[LabHost]]:
    """The hosts of the lab. After the test they are restored: all are up and reach each other."""
    hosts = skyfab_lab.hosts
    yield hosts
    for host in hosts:
        _mend(host, hosts)


def _mend(host: LabHost, hosts: Sequence[LabHost]) -> None:
    from skyfab.errors import UsageError

    if not host.up:
        host.reboot()
    undo: list[Callable[[], None]] = [host.restore, partial(host.slow, None), partial(host.delay, None)]
    undo += [partial(host.unblock, other) for other in hosts if other is not host]
    for action in undo:
        with suppress(UsageError, CalledProcessError):  # hosts on loopback have no cables; or there is nothing to undo
            action()
