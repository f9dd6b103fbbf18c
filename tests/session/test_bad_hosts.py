"""Bad hosts: whatever is wrong with one, the user gets one clear error with a hint, and nothing stays on any host."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage import remote, traces

import skyfab as sky
from skyfab.lab import Lab, LabHost
from skyfab.session.bootstrap import local_python
from skyfab.ssh.logins import retry

pytestmark = pytest.mark.lab

MB = 1024 * 1024
BY = ["openssh", "fabric"]
both = pytest.mark.parametrize("transport", BY)
Hosts = Callable[..., list[sky.Host]]
_users = itertools.count(1)


# Lambdas travel by value: they need none of this project's files on the host.
add = sky.function(lambda one, two: one + two)
home_folder = sky.function(lambda: os.environ["HOME"])
size = sky.function(lambda data: memoryview(data).nbytes)


class Buffer(bytearray):
    """Bytes that travel as an array's do: beside the pickle, and by way of the store."""

    def __reduce_ex__(self, _: object) -> tuple[Any, ...]:
        return bytearray, (pickle.PickleBuffer(self),)


def failure(*hosts: sky.Host, inventory: sky.Inventory | None = None) -> sky.SkyfabError:
    """What opening a pool of these hosts raises."""
    known = inventory or sky.Inventory(hosts={host.name: host for host in hosts})
    with pytest.raises(sky.SkyfabError) as caught, sky.Compute(hosts, inventory=known, ui="none"):
        pass
    return caught.value


ALONE = sky.Image(excludes=("*",))
"""None of this project's files go along."""


def works(*hosts: sky.Host) -> bool:
    with sky.Compute(hosts, ui="none", image=ALONE) as compute:
        return (add(2, 3) >> compute) == 5


def is_clear(error: sky.SkyfabError, kind: type[sky.SkyfabError], says: str, host: str | None = "node1") -> None:
    """One error of that type that names the host, says what is wrong in a line, and has a hint and the exit code 3."""
    assert type(error) is kind, error
    assert error.host == host
    assert says in error.message
    assert "\n" not in error.message
    assert "Traceback" not in str(error)
    assert error.hint, f"no hint: {error}"
    assert error.exit_code == 3
    assert str(error).startswith(f"{host}: ")


@pytest.fixture(autouse=True)
def nothing_stays_on_any_host(lab: Lab) -> Iterator[None]:
    """After each of these tests: no process and no run folder, on any host."""
    yield
    looks: list[Callable[[], set[str]]] = []
    looks += [lambda host=host: traces.on(host) for host in lab.hosts]  # type: ignore[misc]
    looks += [lambda host=host: traces.folders(host) for host in lab.hosts]  # type: ignore[misc]
    left = traces.left(looks)
    assert not left, f"left on hosts: {sorted(left)}"


@pytest.fixture
def new_user(namespaces: Lab, hosts_of: Hosts) -> Callable[..., sky.Host]:
    """``new_user("openssh", "/bin/dash")``: node1 as a user of the test's own."""

    def add_one(
        transport: str = "openssh", login: str = "/bin/sh", *, changes: dict[str, Any] | None = None, **account: Any
    ) -> sky.Host:
        name = f"user{next(_users)}"
        namespaces.hosts[0].add_user(name, **account | {"shell": login})
        host: sky.Host = hosts_of(transport, 1, user=name, **(changes or {}))[0]
        return host

    return add_one


# ---- hosts that cannot be reached


@both
def test_a_name_that_does_not_exist(transport: str) -> None:
    host = sky.Host(name="nowhere", address="no-such-host.invalid", transport=transport)  # type: ignore[arg-type]
    error = failure(host)
    is_clear(error, sky.Unreachable, "no-such-host.invalid", "nowhere")
    assert "set SKYFAB_INVENTORY" in (error.hint or ""), "no file names hosts"
    known = sky.Inventory(hosts={host.name: host}, source=Path("inventory.toml"))
    assert (failure(host, inventory=known).hint or "").startswith("check its address in inventory.toml, or try: ssh ")


@both
def test_a_port_where_nothing_listens(lab: Lab, hosts_of: Hosts, transport: str) -> None:
    error = failure(*hosts_of(transport, 1, port=1))
    is_clear(error, sky.Unreachable, "refused" if transport == "openssh" else "Unable to connect to port 1")
    assert isinstance(error, ConnectionError)
    assert " -p 1 " in (error.hint or "")


@both
def test_a_server_that_is_no_ssh_server(hosts_of: Hosts, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else answers there, and hangs up: each time, as a busy server does not."""
    monkeypatch.setattr("skyfab.session.session.retry", functools.partial(retry, pauses=[0.01] * 5))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # until it is shut down
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=hang_up)
        thread.start()
        host = hosts_of(transport, 1, address="127.0.0.1", port=server.getsockname()[1])[0]
        error = failure(host)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    is_clear(error, sky.Unreachable, "")


@both
def test_a_host_that_is_down_is_reported_with_every_other_failure_at_once(
    namespaces: Lab, hosts_of: Hosts, transport: str
) -> None:
    """One is off, one refuses, two are fine: one error names both, and the pools of the good ones are closed."""
    one, two, down, closed = hosts_of(transport, 4)
    down = replace(down, address=namespaces.hosts[0].network.address(250))
    closed = replace(closed, port=1)
    error = failure(one, down, two, closed)
    assert type(error) is sky.PoolError
    assert error.exit_code == 3
    assert error.message == "2 of 4 hosts failed"
    assert [type(each) for each in error.exceptions] == [sky.Unreachable, sky.Unreachable]
    assert [each.host for each in error.exceptions] == ["node3", "node4"]  # type: ignore[attr-defined]
    assert all(each.hint for each in error.exceptions)  # type: ignore[attr-defined]
    assert "node3: " in str(error)
    assert "node4: " in str(error)
    assert str(error).count("hint: ") == 2


# ---- what login shells do


BASHRC = {
    "much noise": (
        "echo '*** Welcome to node1 ***'; echo; no-such-command --at-all; head -c 200000 /dev/zero | tr '\\0' x\n"
        "head -c 3000 /dev/urandom; echo '=skyfab=0123456789abcdef=link'; read -r -t 0 line; printf '=skyfab='\n"
    ),
    "no output for errors": "exec 2>&-; printf 'text without a newline'\n",
    "other settings": "set -o noclobber -o nounset; umask 000; cd /; alias exec=false; IFS=x\n",
}


@pytest.mark.parametrize("bashrc", BASHRC.values(), ids=BASHRC)
@both
def test_what_bashrc_does_does_no_harm(new_user: Callable[..., sky.Host], transport: str, bashrc: str) -> None:
    assert works(new_user(transport, "/bin/bash", bashrc=bashrc))


@pytest.mark.timeout(60)
@both
@pytest.mark.slow
def test_a_bashrc_that_prints_without_end_is_given_up(new_user: Callable[..., sky.Host], transport: str) -> None:
    error = failure(new_user(transport, "/bin/bash", bashrc="yes\n"))
    is_clear(error, sky.HostUnfit, "prints endlessly")


@pytest.mark.slow
def test_a_bashrc_that_closes_the_input_leaves_no_process(new_user: Callable[..., sky.Host]) -> None:
    assert isinstance(failure(new_user("openssh", "/bin/bash", bashrc="exec 0<&-\n")), sky.SkyfabError)


@both
def test_a_bashrc_that_exits_says_what_it_said(new_user: Callable[..., sky.Host], transport: str) -> None:
    error = failure(new_user(transport, "/bin/bash", bashrc="echo 'this node is for batch jobs'; exit 1\n"))
    is_clear(error, sky.HostUnfit, "this node is for batch jobs")


@pytest.mark.parametrize("shell", ["tcsh", "fish", "zsh", "ksh", "busybox", "rbash"])
@both
def test_a_login_shell(namespaces: Lab, new_user: Callable[..., sky.Host], transport: str, shell: str) -> None:
    """A call goes through it, with a cache folder that has spaces, quotes and dollars in its name."""
    path = shutil.which(shell, path="/usr/bin:/bin")
    if path is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    if shell == "busybox":  # which looks at the name that it is called by
        namespaces.hosts[0].run(["sh", "-c", f"mkdir -p /opt/busybox; ln -sf {path} /opt/busybox/sh"])
        path = "/opt/busybox/sh"
    host = new_user(transport, path)
    if shell == "rbash":  # restricted: it may not run a program by its path
        is_clear(failure(host), sky.HostUnfit, "restricted")
        return
    assert works(replace(host, cache='~/it\'s a "cache" for $5 & `more`! *'))


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("/usr/sbin/nologin", "This account is currently not available"),
        ("/bin/false", "its login shell did not run our command"),
    ],
)
@both
def test_an_account_that_may_not_log_in(
    new_user: Callable[..., sky.Host], transport: str, shell: str, says: str
) -> None:
    is_clear(failure(new_user(transport, shell)), sky.HostUnfit, says)


@both
def test_a_home_folder_with_spaces_and_quotes(new_user: Callable[..., sky.Host], transport: str) -> None:
    place = f'/home/o\'brien "the {transport}" $HOME; `x` *ü'
    with sky.Compute([new_user(transport, home=place)], ui="none", image=ALONE) as compute:
        assert home_folder() >> compute == place


@both
def test_a_home_folder_that_is_not_there(namespaces: Lab, new_user: Callable[..., sky.Host], transport: str) -> None:
    """As on machines whose homes are mounted later."""
    host = new_user(transport, home=f"/home/gone-{transport}")
    namespaces.hosts[0].run(["rmdir", f"/home/gone-{transport}"])
    is_clear(failure(host), sky.HostUnfit, "cannot set up skyfab")


# ---- disks


@pytest.fixture
def disk(namespaces: Lab) -> Iterator[Callable[[float], str]]:
    """``disk(0.1)``: an empty disk of so many megabytes on node1, everybody's."""
    host = namespaces.hosts[0]
    with ExitStack() as stack:

        def make(megabytes: float) -> str:
            place = f"/small{len(host.run(['ls', '/']).stdout.split())}"
            host.run(["mkdir", "-m", "1777", place])
            host.small_disk(place, megabytes)
            stack.callback(host.run, ["rmdir", place])
            stack.callback(host.run, ["umount", place])
            return place

        yield make


def files(host: LabHost, place: str) -> set[str]:
    """Files on the host below a folder, but for the logs, which are there to stay."""
    return {file for file in host.run(["find", place, "-type", "f"]).stdout.splitlines() if "/logs/" not in file}


@both
def test_a_disk_too_small_for_the_bundle(
    namespaces: Lab, hosts_of: Hosts, disk: Callable[[float], str], transport: str
) -> None:
    place = disk(0.05)
    error = failure(*hosts_of(transport, 1, cache=f"{place}/cache"))
    is_clear(error, sky.HostUnfit, "No space left on device")
    assert "space" in (error.hint or "")
    assert not files(namespaces.hosts[0], place), "half a bundle is worse than none"


def fill(host: LabHost, place: str, name: str = "fill") -> None:
    host.run(["sh", "-c", f"cat /dev/zero >{place}/{name}"], check=False)


@both
def test_a_disk_that_runs_full_while_a_blob_is_stored(
    namespaces: Lab, hosts_of: Hosts, disk: Callable[[float], str], transport: str
) -> None:
    """The call fails with the reason, the half-written blob is gone, and the pool goes on working."""
    place = disk(6)
    with sky.Compute(hosts_of(transport, 1, cache=f"{place}/cache"), ui="none", image=ALONE, ranks=2) as compute:
        assert add(2, 3) >> compute == 5
        before = files(namespaces.hosts[0], place)
        data = Buffer(os.urandom(16 * MB))
        with pytest.raises(sky.SkyfabError) as caught:
            size(data) @ compute
        error = caught.value.exceptions[0] if isinstance(caught.value, sky.BroadcastError) else caught.value
        assert isinstance(error, sky.HostUnfit)
        assert "No space left" in error.message
        assert error.hint
        assert not {file for file in files(namespaces.hosts[0], place) - before if "/blobs/" in file}
        assert add(2, 3) >> compute == 5
        assert size(Buffer(data[:MB])) @ compute == [MB, MB]
        assert size(Buffer(data[::-1])) >> compute == 16 * MB, (
            "what comes once goes straight to the rank, and needs no disk"
        )


@pytest.mark.parametrize("cache", ["/usr/skyfab", "/etc/passwd/cache"])
@both
def test_a_cache_folder_that_cannot_be_written(namespaces: Lab, hosts_of: Hosts, transport: str, cache: str) -> None:
    """Not allowed, or not a folder."""
    error = failure(*hosts_of(transport, 1, user="ada", cache=cache))
    is_clear(error, sky.HostUnfit, "cannot set up skyfab")
    assert cache.removesuffix("/cache") in error.message
    assert "cache = " in (error.hint or "")


# ---- interpreters


@both
def test_a_path_without_any_python(new_user: Callable[..., sky.Host], transport: str) -> None:
    """One is found where interpreters are."""
    if not Path(f"/usr/bin/python{local_python()}").exists():
        pytest.skip(f"Debian's Python here is not {local_python()}")
    host = new_user(transport, "/bin/bash", bashrc="PATH=/nothing/here\n", changes={"python": "auto"})
    with sky.Compute([host], ui="none") as compute:
        assert (sky.function(remote.where)() >> compute)[0].startswith("/usr/bin/python")


@both
def test_an_interpreter_that_breaks(namespaces: Lab, hosts_of: Hosts, transport: str) -> None:
    """One whose library is gone: what it says last is in the error."""
    host = namespaces.hosts[0]
    script = host.path("/usr/local/bin/broken-python")
    script.write_text("#!/bin/sh\necho 'error while loading shared libraries: libpython' >&2\nexit 127\n")
    script.chmod(0o755)
    error = failure(*hosts_of(transport, 1, python="/usr/local/bin/broken-python"))
    is_clear(error, sky.HostUnfit, "libpython")


VERSIONS = ["2.7", "3.8", "3.10", "3.14"]
STAND_IN = """#!PYTHON -S
# Takes an interpreter's arguments, and has what it runs believe that it is another version.
import runpy, sys
major, minor = map(int, "VERSION".split("."))
sys.version_info = (major, minor, 7, "final", 0)
sys.version = "VERSION.7 (a stand-in)"
sys.executable = sys.argv[0]
sys.argv[:] = sys.argv[2:] if sys.argv[1] == "-S" else sys.argv[1:]
if sys.argv[0] == "-c":
    code, sys.argv[1:2] = sys.argv[1], []
    exec(code)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def other_pythons() -> dict[str, Path]:
    """Interpreters of other minors on this machine, by version: where pyenv or uv have put them."""
    found = {}
    for path in Path(sys.base_prefix).parent.glob("*/bin/python[23].*"):
        version = path.name.removeprefix("python")
        if version.replace(".", "").isdigit() and version != local_python() and not path.is_symlink():
            found[version] = path
    return found


@pytest.fixture(scope="module")
def museum(lab: Lab) -> Iterator[Lab]:
    """A host with interpreters of other versions: real ones where this machine has them."""
    if lab.kind != "namespace":
        pytest.skip(lab.limits[0])
    real = other_pythons()
    with Lab.start(1, kind="namespace", lend=[str(path.parents[1]) for path in real.values()]) as other:
        host = other.hosts[0]
        for version in VERSIONS:
            place = host.path(f"/usr/local/bin/museum-{version}")
            if version in real:
                place.symlink_to(real[version])
            else:
                place.write_text(STAND_IN.replace("PYTHON", host.python).replace("VERSION", version))
                place.chmod(0o755)
        yield other


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != local_python()])
def test_another_minor_is_refused_before_anything_is_unpickled(museum: Lab, version: str) -> None:
    """However old: the pool does not open, so no function ever travels; the error names both versions."""
    before = traces.folders(museum.hosts[0])
    (host,) = sky.Inventory.of(museum.inventory).hosts.values()
    error = failure(replace(host, python=f"/usr/local/bin/museum-{version}"))
    is_clear(error, sky.HostUnfit, version)
    assert local_python() in str(error)
    left = traces.left([lambda: traces.on(museum.hosts[0]), lambda: traces.folders(museum.hosts[0])], before)
    assert not left, f"left on the host: {sorted(left)}"
