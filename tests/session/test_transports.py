"""Transports: one conformance suite for local, fabric and openssh, and every way in that the two of SSH have."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from stage.remote import flood_link
from stage.spot import Spot, until
from stage.threads import begin

import skyfab as sky
from skyfab.lab import Lab
from skyfab.ssh import Stream, transport_for
from skyfab.ssh.fabric import Fabric
from skyfab.ssh.logins import ServerBusy
from skyfab.ssh.openssh import OpenSSH, _is_since, explain
from skyfab.ssh.process import ProcessStream
from skyfab.ssh.prompts import Prompts, places
from skyfab.ui.prompt import TERMINAL

pytestmark = pytest.mark.lab

MB = 1024 * 1024
both = pytest.mark.parametrize("by", ["openssh", "fabric"])
"""The two that go over SSH."""

Open = Callable[[str], Stream]
Hosts = Callable[..., list[sky.Host]]


def settings_of(words: list[str]) -> dict[str, str]:
    """What ssh would do with this command line."""
    done = subprocess.run([words[0], "-G", *words[1:]], capture_output=True, text=True, check=True)
    return {key: value for line in done.stdout.splitlines() for key, _, value in [line.partition(" ")]}


@pytest.mark.skipif(not _is_since(8, 7), reason="ssh does not know these settings")
@pytest.mark.parametrize("jump", [None, "gateway"])
def test_settings_of_ssh_config_neither_weaken_a_login_nor_change_its_streams(
    jump: str | None, lab: Lab, ssh_config: Callable[[str], None]
) -> None:
    ssh_config(
        "Host *\n  NoHostAuthenticationForLocalhost yes\n  VerifyHostKeyDNS yes\n  KnownHostsCommand /bin/cat %f\n"
        "  SessionType none\n  StdinNull yes\n  ForkAfterAuthentication yes\n"
    )
    host = sky.Host(name="node1", address="127.0.0.1", jump=jump, host_key=lab.hosts[0].host_key)
    gateway = sky.Host(name="gateway", address="192.0.2.1", host_key=host.host_key)
    way = OpenSSH(host, sky.Inventory(hosts={"node1": host, "gateway": gateway}))
    with closing(way):
        words = way.argv("true")
        found = [settings_of(words), settings_of(way.argv(None))]
        if jump:
            found.append(settings_of([*words[:4], "skyfab-jump-0"]))  # as ssh -W, which sets its SessionType
    for one in found:
        assert "knownhostscommand" not in one, "none"
        assert (one["nohostauthenticationforlocalhost"], one["verifyhostkeydns"]) == ("no", "false")
        assert (one["stdinnull"], one["forkafterauthentication"]) == ("no", "no")
    assert [one["sessiontype"] for one in found[:2]] == ["default", "none"]


@pytest.mark.parametrize("jump", ["root@gateway", "gateway:2201"])
def test_a_jump_host_of_the_inventory_keeps_its_keys_with_another_user_or_port(jump: str) -> None:
    host = sky.Host(name="node1", address="127.0.0.1", jump=jump)
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPUnK2Ray/BWDM/iFcd8qYpFn0ZZwGRpokCBZRVDGLkJ"
    gateway = sky.Host(name="gateway", address="192.0.2.1", user="ada", port=2200, host_key=key, identity="/keys/id")
    way = OpenSSH(host, sky.Inventory(hosts={"node1": host, "gateway": gateway}))
    with closing(way):
        words = way.argv("true")
        assert words[words.index("-J") + 1] == "skyfab-jump-0"
        found = settings_of([*words[:4], "skyfab-jump-0"])
        known = Path(found["userknownhostsfile"]).read_text()
        assert "IdentityFile /keys/id\n" in Path(words[3]).read_text()
    assert known == f"{found['hostkeyalias']} {gateway.host_key}\n"
    assert (found["hostname"], found["identitiesonly"]) == ("192.0.2.1", "yes")
    assert found["user"] == ("root" if "@" in jump else "ada")
    assert found["port"] == ("2201" if ":" in jump else "2200")


def test_ciphers_of_ssh_config_are_used(
    ssh_config: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An old server, or a policy, may need them."""
    monkeypatch.setattr("skyfab.ssh.openssh._has_aes", lambda: True)
    way = OpenSSH(sky.Host(name="node1", address="192.0.2.1"), sky.Inventory(hosts={}))
    assert settings_of(way.argv("true"))["ciphers"].startswith("aes128-gcm@openssh.com,")
    (tmp_path / "policy").write_text("Host node1 192.0.2.*\n  ciphers aes256-ctr\n")
    ssh_config(f"Include {tmp_path}/policy\n")
    assert settings_of(way.argv("true"))["ciphers"] == "aes256-ctr"


# ---- the conformance suite


@pytest.fixture
def opened(transport: str, hosts_of: Hosts) -> Iterator[Open]:
    """``opened("cat")``: the command's stream, by each transport in turn; closed after the test."""
    with ExitStack() as stack:

        def open_it(command: str) -> Stream:
            host = hosts_of(transport, 1)[0]
            way = transport_for(host, sky.Inventory(hosts={host.name: host}))
            stack.callback(way.close)
            stream = way.open(command)
            stack.callback(stream.close)
            return stream

        yield open_it


def wait_for(stream: Stream, *, room: bool = False) -> None:
    """Waits as its protocol says: for bytes, or for room where something tells of it."""
    sink = stream.sink() if room else None
    blind = room and sink is None
    poll = select.poll()
    for fd, event in ((stream.fileno(), select.POLLIN), (sink, select.POLLOUT), (stream.stderr(), select.POLLIN)):
        if fd is not None:
            poll.register(fd, event)
    poll.poll(2 if blind else 60_000)
    stream.drain()


def try_to_receive(stream: Stream, view: memoryview) -> int | None:
    """None: there is nothing yet."""
    try:
        return stream.recv_into(view)
    except BlockingIOError:
        return None


def some(stream: Stream, size: int = MB) -> bytes:
    """The next bytes; none at the end."""
    buffer = bytearray(size)
    while (count := try_to_receive(stream, memoryview(buffer))) is None:
        wait_for(stream)
    return bytes(buffer[:count])


def rest(stream: Stream) -> bytes:
    """Everything until the end."""
    return b"".join(iter(lambda: some(stream), b""))


def exchange(
    stream: Stream, pieces: Iterator[bytes], expected: int, take: Callable[[bytes], object]
) -> tuple[int, bool]:
    """Sends all pieces and takes so many bytes, both at once; says how many came, and whether the stream goes on."""
    piece = memoryview(next(pieces, b""))
    buffer = memoryview(bytearray(MB))
    came = 0
    while piece or came < expected:
        moved = False
        if piece:
            try:
                piece = piece[stream.send([piece]) :] or memoryview(next(pieces, b""))
                moved = True
            except BlockingIOError:
                pass
        count = try_to_receive(stream, buffer)
        if count == 0:
            return came, False
        if count:
            take(bytes(buffer[:count]))
            came += count
            moved = True
        if not moved:
            wait_for(stream, room=bool(piece))
    return came, True


def echo(stream: Stream, data: bytes) -> bytes:
    found: list[bytes] = []
    exchange(stream, iter([data]), len(data), found.append)
    return b"".join(found)


def test_every_byte_value_comes_back_unchanged(opened: Open) -> None:
    data = bytes(range(256)) * 4 + b"\n~.\n~~\r\n\x00\x04\x1a\x03"  # with what terminals and ssh's escapes would take
    assert echo(opened("cat"), data) == data


def test_12_mb_each_way_at_once(opened: Open) -> None:
    """Neither side waits for the other to read first."""
    data = os.urandom(MB) * 12
    assert hashlib.sha256(echo(opened("cat"), data)).digest() == hashlib.sha256(data).digest()


def test_a_full_pipe_says_so_and_does_not_block(opened: Open) -> None:
    """Nobody reads at the other end: at some point there is no room, and trying says so at once."""
    stream = opened("read line; cat")
    piece = bytes(MB)

    def fill() -> None:
        for _ in range(512):
            stream.send([piece])

    with pytest.raises(BlockingIOError):
        fill()


def test_the_end_of_the_command_is_the_end_of_the_stream(opened: Open) -> None:
    stream = opened("printf 1; echo noise >&2; printf 2; echo noise >&2; printf 3")
    assert rest(stream) == b"123", "stderr does not mix in"
    assert some(stream) == b"", "and it stays ended"


def test_closing_ends_the_input_of_the_command(transport: str, hosts_of: Hosts, spot: Spot) -> None:
    host = hosts_of(transport, 1)[0]
    way = transport_for(host, sky.Inventory(hosts={host.name: host}))
    stream = way.open(f"echo ready; cat >/dev/null; echo over >{spot / 'over'}")
    assert some(stream).startswith(b"ready")
    for _ in range(2):
        stream.close()
        way.close()
    spot.wait("over")


def test_sending_to_a_command_that_has_ended_is_an_error(opened: Open) -> None:
    stream = opened("exec true")
    assert rest(stream) == b""

    def refused() -> bool:
        try:
            stream.send([bytes(MB)])
        except BlockingIOError:  # its output ends a moment before its input
            return False
        except OSError:
            return True
        return False

    until(refused, "an error other than that there is no room")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo first >&2; echo the reason >&2; exit 7", "the connection ended: the reason"),
        ("exec /no/such/program", "the connection ended: .*/no/such/program.*"),
    ],
)
def test_a_command_that_fails_explains_itself(opened: Open, command: str, message: str) -> None:
    """The last line of its stderr is what the user is told."""
    stream = opened(command)
    assert rest(stream) == b""
    error = stream.explain()
    assert isinstance(error, sky.HostLost)
    assert (error.exit_code, bool(error.host)) == (3, True)
    assert re.fullmatch(message, error.message)


def test_a_flood_of_stderr_takes_no_disk_and_its_end_is_kept(opened: Open) -> None:
    """A host writes what it likes there, for as long as the session lasts."""
    stream = opened("head -c 7000000 /dev/zero >&2; echo the reason >&2; exit 7")
    assert rest(stream) == b""
    assert temporary_bytes() < MB
    assert isinstance(error := stream.explain(), sky.HostLost)
    assert error.message.endswith("the reason")


def test_a_flood_of_stderr_stops_nothing_in_an_open_pool(open_pool: Callable[..., sky.Compute]) -> None:
    """The link on the host has the connection's stderr; the thread that reads the connection drains it."""
    compute = open_pool("openssh", user="root")
    assert sky.function(flood_link)(compute.hosts[0].session._bootstrap.session) >> compute == 70_000_000
    assert temporary_bytes() < MB


def temporary_bytes() -> int:
    """In files without a name that this program has open."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them
            found = os.fstat(int(fd.name))
            total += found.st_size if stat.S_ISREG(found.st_mode) and not found.st_nlink else 0
    return total


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many files are open that new ones have numbers which `select` cannot take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"a program may have {hard} files open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for fd in files:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_program_with_more_than_1024_files_open_has_pools_too(
    transport: str, open_pool: Callable[..., sky.Compute]
) -> None:
    compute = open_pool(transport)
    assert len(where() >> compute) == 3


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_more_than_512_mb_each_way(hosts_of: Hosts) -> None:
    """paramiko changes keys after 512 MB, in the middle of the traffic: nothing is lost, nothing hangs."""
    host = hosts_of("fabric", 1)[0]
    way = transport_for(host, sky.Inventory(hosts={host.name: host}))
    stream = way.open("cat")
    piece = os.urandom(MB)
    there, back = hashlib.sha256(piece * 600), hashlib.sha256()
    try:
        assert exchange(stream, iter([piece] * 600), 600 * MB, back.update) == (600 * MB, True)
        assert back.digest() == there.digest()
    finally:
        stream.close()
        way.close()


@pytest.mark.parametrize("then", ["wait", "exit 255"])
def test_a_stream_ends_with_what_its_program_has_started(then: str, runs_on: Callable[[str, int], bool]) -> None:
    """To a host behind others, ssh starts an ssh of its own, which may outlive it."""
    stream = ProcessStream(["sh", "-c", f"sleep 600 & echo $!; {then}"], lambda code, text: RuntimeError(text))
    wait_for(stream)
    view = memoryview(bytearray(20))
    child = int(bytes(view[: stream.recv_into(view)]))
    assert runs_on("here", child)
    stream.close()
    until(lambda: not runs_on("here", child), "the end of its child")


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (
            "ssh: connect to host 10.0.0.1 port 22: Connection refused",
            "its jump host is unreachable: connect to",
        ),
        (
            "channel 0: open failed: connect failed: No route to host",
            "its jump host cannot connect to it: No route",
        ),
        ("zsh:1: command not found: nc", "closed the connection before the login"),
        ("kex_exchange_identification: read: Connection reset by peer", "closed the connection before the login"),
    ],
)
def test_a_server_that_is_not_reached_is_not_taken_for_a_busy_one(said: str, what: str) -> None:
    """What an inner ssh or a ProxyCommand says comes before the words of the outer ssh."""
    outer = (
        "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535\r\n"
    )
    host = sky.Host(name="a")
    error = explain([host], 255, f"{said}\r\n{outer}", sky.Inventory(hosts={"a": host}))
    assert what in str(error)
    assert isinstance(error, ServerBusy) == ("closed the connection before" in what)


def test_what_a_command_on_the_host_says_is_not_taken_for_a_refused_key() -> None:
    """PYTHONVERBOSE=1 in its environment: Python says which files it could not read or write, and how it ends."""
    host = sky.Host(name="a")
    said = (
        "# could not create 'x.pyc': PermissionError(13, 'Permission denied')\nNameError: x\n# clear sys.audit hooks\n"
    )
    error = explain([host], 1, said, sky.Inventory(hosts={"a": host}))
    assert isinstance(error, sky.HostLost) and "NameError: x" in str(error)
    git = "Host key verification failed.\nfatal: Could not read from remote repository.\n"
    assert isinstance(explain([host], 1, git, sky.Inventory(hosts={"a": host})), sky.HostLost)
    refused = explain([host], 255, "ada@a: Permission denied (publickey).", sky.Inventory(hosts={"a": host}))
    assert isinstance(refused, sky.AuthenticationRefused)


def test_no_text_of_a_host_takes_long_to_examine() -> None:
    """It may write anything before the login fails, of which 64 KiB are kept: hours with a careless pattern."""
    host, text = sky.Host(name="a"), f"{'@' * 65536}\nPermission denied"
    assert isinstance(explain([host], 255, text, sky.Inventory(hosts={"a": host})), sky.AuthenticationRefused)


# ---- which transport


def test_auto_is_the_ssh_program_and_fabric_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host, nobody = sky.Host(name="a", transport="auto"), sky.Inventory(hosts={})
    assert isinstance(transport_for(host, nobody), OpenSSH)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(transport_for(host, nobody), Fabric)


where = sky.function(
    lambda: (socket.gethostname(), os.environ.get("USER", ""), os.environ.get("SSH_CONNECTION", "?").split()[0])
)
"""The host's name, who we are there, and the address the login came from. By value: no file needs to go along."""


# ---- jump hosts and ssh_config


@pytest.fixture
def known_hosts(home: Path) -> Iterator[Path]:
    """The user's known_hosts, empty before and after."""
    file = home / ".ssh" / "known_hosts"
    file.write_text("")
    yield file
    file.write_text("")


@pytest.fixture
def ssh_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts lines before what the user's ssh_config says."""
    base = Path(os.environ["SKYFAB_SSH_CONFIG"]).read_text()

    def write(lines: str) -> None:
        file = tmp_path / "config"  # without a space: for a ProxyJump ssh itself cannot have one
        file.write_text(lines + "\n" + base)
        monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(file))

    return write


@pytest.fixture(autouse=True)
def no_temporary_files_stay(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """What a transport writes for the ssh program goes with it."""
    if "spot" in request.fixturenames:  # it must be a folder that hosts have too
        yield
        return
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert not list(place.iterdir())


def record(file: Path, *pairs: tuple[str, str]) -> None:
    """Writes known_hosts lines: address and key."""
    file.write_text("".join(f"{address} {key}\n" for address, key in pairs))


def pool_of(host: sky.Host, *others: sky.Host) -> sky.Compute:
    """A pool of one host, in an inventory of several."""
    inventory = sky.Inventory(hosts={each.name: each for each in (host, *others)})
    return sky.Compute([host], inventory=inventory, image=sky.Image(excludes=("*",)), ui="none")


@pytest.mark.parametrize("jumps", [0, 1])
def test_sending_by_fabric_does_not_wait_for_a_network_that_is_down(
    namespaces: Lab, hosts_of: Hosts, jumps: int
) -> None:
    """paramiko waited for the socket, and with it the thread that serves all hosts."""
    host, jump = hosts_of("fabric", 2)
    host = replace(host, jump=jump.name) if jumps else host
    way = transport_for(host, sky.Inventory(hosts={host.name: host, jump.name: jump}))
    stream = way.open("cat > /dev/null")
    first = namespaces[jump.name if jumps else host.name]
    try:
        stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)  # type: ignore[attr-defined]
        first.cut()

        def fill() -> int:
            sent = 0
            while True:
                try:
                    sent += stream.send([bytes(MB)])
                except BlockingIOError:
                    return sent

        assert begin(fill).result(170) < 4 * MB
    finally:
        first.restore()
        stream.close()
        way.close()


def test_sending_by_fabric_after_the_connection_was_reset_is_a_broken_pipe(hosts_of: Hosts) -> None:
    host = hosts_of("fabric", 1)[0]
    way = transport_for(host, sky.Inventory(hosts={host.name: host}))
    stream = way.open("cat")
    way._connection.client.get_transport().close()  # type: ignore[attr-defined]
    with pytest.raises(BrokenPipeError):
        stream.send([b"x"])
    stream.close()
    way.close()


@both
def test_two_jump_hosts_in_a_row(namespaces: Lab, hosts_of: Hosts, by: str) -> None:
    """Each has its own user and host key."""
    first, second, target = hosts_of(by, 3, user="root")
    with pool_of(replace(target, jump="node2"), first, replace(second, user="ada", jump="node1")) as compute:
        assert where() >> compute == ("node3", "root", namespaces["node2"].address)
        assert compute.hosts[0].connection.run("hostname", hide=True, in_stream=False).stdout.strip() == "node3"


@both
def test_an_unknown_key_of_a_jump_host_of_no_inventory_is_refused_whatever_ssh_config_says(
    namespaces: Lab, hosts_of: Hosts, by: str, known_hosts: Path, ssh_config: Callable[[str], None]
) -> None:
    lax = {"openssh": "no", "fabric": "accept-new"}[by]
    ssh_config(alias(namespaces, "bastion", "node1") + f"Host *\n  StrictHostKeyChecking {lax}\n")
    with pytest.raises(sky.HostKeyRefused):
        pool_of(replace(hosts_of(by, 2)[1], jump="bastion")).open()
    assert known_hosts.read_text() == ""


@both
def test_a_target_that_refuses_behind_a_jump_host_leaves_no_connection(
    namespaces: Lab, hosts_of: Hosts, by: str
) -> None:
    """The way there is taken down too: the threads and sockets of the jump host's connection."""
    jump, target = hosts_of(by, 2)
    with pytest.raises(sky.HostKeyRefused), pool_of(replace(target, jump="node1", host_key=jump.host_key), jump):
        pass


def alias(lab: Lab, name: str, host: str, more: str = "", user: str = "root") -> str:
    address = lab[host].address
    return f"Host {name}\n  HostName {address}\n  User {user}\n  IdentityFile {lab[host].identity}\n  {more}\n"


def test_hosts_that_only_ssh_config_has_are_reached(
    namespaces: Lab, known_hosts: Path, ssh_config: Callable[[str], None]
) -> None:
    """As an inventory, and one of them beside an inventory file."""
    ssh_config(alias(namespaces, "box1", "node1", user="ada") + alias(namespaces, "box2", "node2") + "Host other\n")
    record(known_hosts, *((host.address, host.host_key) for host in namespaces.hosts))
    with sky.Compute(inventory="ssh_config:box*", ui="none") as compute:
        assert [place[:2] for place in where() @ compute] == [("node1", "ada"), ("node2", "root")]
    with sky.Compute("box2", inventory=namespaces.inventory, ui="none") as compute:
        assert (where() >> compute)[:2] == ("node2", "root")


@both
def test_an_alias_and_a_proxyjump_of_ssh_config(
    namespaces: Lab, by: str, known_hosts: Path, ssh_config: Callable[[str], None]
) -> None:
    """Address, user and key are ssh_config's matter; the host is known by its alias."""
    inner = alias(namespaces, "inner", "node2", "ProxyJump bastion", user="ada")
    ssh_config(alias(namespaces, "bastion", "node1") + inner)
    record(known_hosts, *((host.address, host.host_key) for host in namespaces.hosts))
    with pool_of(sky.Host(name="inner", transport=by, python=namespaces["node2"].python)) as compute:  # type: ignore[arg-type]
        assert where() >> compute == ("node2", "ada", namespaces["node1"].address)
        assert compute.hosts[0].name == "inner"


@both
def test_the_key_of_a_proxyjump_is_checked_too(
    namespaces: Lab, by: str, known_hosts: Path, ssh_config: Callable[[str], None]
) -> None:
    """Only the target is known: the bastion could be anybody."""
    ssh_config(alias(namespaces, "bastion", "node1") + alias(namespaces, "inner", "node2", "ProxyJump bastion"))
    record(known_hosts, (namespaces["node2"].address, namespaces["node2"].host_key))
    with pytest.raises(sky.HostKeyRefused):
        pool_of(sky.Host(name="inner", transport=by, python=namespaces["node2"].python)).open()  # type: ignore[arg-type]


@both
def test_jump_none_goes_directly_whatever_ssh_config_says(
    namespaces: Lab, hosts_of: Hosts, by: str, known_hosts: Path, ssh_config: Callable[[str], None]
) -> None:
    ssh_config(alias(namespaces, "inner", "node2", "ProxyJump nobody@127.0.0.1:1"))
    record(known_hosts, *((host.address, host.host_key) for host in namespaces.hosts))
    host = sky.Host(name="inner", jump="none", transport=by, python=namespaces["node2"].python)  # type: ignore[arg-type]
    with pool_of(host) as compute:
        assert (where() >> compute)[0] == "node2"


# ---- keys and agents


@both
def test_an_identity_file_is_the_only_key_offered(
    namespaces: Lab, hosts_of: Hosts, home: Path, by: str, agent: Callable[[Path], None]
) -> None:
    """The agent has a key that would do; the inventory names another one, and that is what counts."""
    agent(namespaces.hosts[0].identity)
    host = hosts_of(by, 1, identity=str(home / ".ssh" / "id_ed25519"))[0]
    with pytest.raises(sky.AuthenticationRefused), pool_of(host):
        pass


@both
def test_an_identity_file_in_a_folder_with_a_space(hosts_of: Hosts, lab: Lab, tmp_path: Path, by: str) -> None:
    key = tmp_path / "my keys 100%" / "id"
    key.parent.mkdir()
    shutil.copy(lab.hosts[0].identity, key)
    key.chmod(0o600)
    with pool_of(hosts_of(by, 1, identity=str(key))[0]) as compute:
        assert len(where() >> compute) == 3


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """``agent(key)``: an ssh-agent of the test's own that holds the key."""
    with ExitStack() as stack:

        def start(key: Path) -> None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="skyfab-agent-", dir="/tmp"))
            place = f"{folder}/socket"
            process = subprocess.Popen(["ssh-agent", "-D", "-a", place], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            until(lambda: Path(place).exists(), "the agent's socket")
            monkeypatch.setenv("SSH_AUTH_SOCK", place)
            subprocess.run(["ssh-add", "-q", str(key)], check=True, capture_output=True)

        yield start


@both
def test_a_key_in_the_agent_lets_us_in(lab: Lab, hosts_of: Hosts, by: str, agent: Callable[[Path], None]) -> None:
    host = hosts_of(by, 1, identity=None)[0]
    with pytest.raises(sky.AuthenticationRefused):
        pool_of(host).open()
    agent(lab.hosts[0].identity)
    with pool_of(host) as compute:
        assert len(where() >> compute) == 3
        assert compute.hosts[0].connection.run("echo in", hide=True, in_stream=False).stdout == "in\n"


# ---- passwords


class Person:
    """Stands in for the terminal, and answers what is asked there."""

    def __init__(self, answers: list[str]) -> None:
        self.answers = answers
        self.prompts: list[str] = []

    def __call__(self, prompt: str, stopped: object = None) -> str:
        self.prompts.append(prompt)
        return self.answers.pop(0)


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Person]:
    def sit_down(*answers: str) -> Person:
        found = Person(list(answers))
        monkeypatch.setattr(TERMINAL, "ask", found)
        monkeypatch.setattr(TERMINAL, "is_attended", lambda: True)
        return found

    return sit_down


def with_password(hosts_of: Hosts, user: str, by: str = "fabric") -> sky.Host:
    host: sky.Host = hosts_of(by, 1, user=user, identity=None)[0]
    return host


@both
def test_a_password_is_asked_for_once_and_shows_nowhere(
    namespaces: Lab, hosts_of: Hosts, person: Callable[..., Person], caplog: pytest.LogCaptureFixture, by: str
) -> None:
    """Not in the arguments of any process, not in paramiko's or our logs, not in what anything prints as."""
    secret = f"secret of {by}"
    namespaces.hosts[0].add_user(f"pat-{by}", password=secret)
    pat = person(secret)
    host = with_password(hosts_of, f"pat-{by}", by)
    caplog.set_level(logging.DEBUG)
    for _ in range(2):
        with pool_of(host) as compute:
            assert (where() >> compute)[:2] == ("node1", f"pat-{by}")
            node = compute.hosts[0]
            arguments = b"\n".join(_bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline"))
            shown = f"{compute!r} {node!r} {node.host!r} {node.session!r} {vars(compute)!r} {vars(node.session)!r}"
    assert len(pat.prompts) == 1
    assert f"pat-{by}@{host.address}" in pat.prompts[0]
    assert b"sshd" in arguments, "the processes of hosts are in sight"
    assert secret.encode() not in arguments
    assert secret not in shown
    assert caplog.records, "paramiko was heard, or ssh's command line"
    assert secret not in caplog.text


def test_a_password_is_for_one_port_and_one_way_alone(person: Callable[..., Person]) -> None:
    """Behind a forwarded port, or another jump host, the same address is another machine."""
    gateway = sky.Host(name="a", address="10.0.0.1", port=2201, user="ada")
    bastion = sky.Host(name="b", address="10.0.0.2")
    pat = person("first", "second", "third")
    ways = [[gateway], [replace(gateway, port=2202)], [bastion, gateway]]
    logins = [Prompts() for _ in range(2)]
    try:
        for login in logins:
            found = [login.answer(places(way, "ada")[-1], "Password: ") for way in ways]
            assert found == ["first", "second", "third"]
        assert len(set(pat.prompts)) == 2, "each names the address and the port"
        assert len(pat.prompts) == 3
    finally:
        for login in logins:
            login.refused()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended while we looked
        return b""


# ---- host keys


@pytest.fixture
def stranger(hosts_of: Hosts) -> Callable[[str], sky.Host]:
    """A host whose key is in no inventory."""
    return lambda by: hosts_of(by, 1, host_key=None)[0]


def place(host: sky.Host) -> str:
    return str(host.address) if host.port in (None, 22) else f"[{host.address}]:{host.port}"


@both
def test_an_unknown_key_is_refused_with_the_command_that_records_it(
    stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    host = stranger(by)
    with pytest.raises(sky.HostKeyRefused) as caught:
        pool_of(host).open()
    assert (caught.value.host, caught.value.exit_code) == ("node1", 3)
    assert "unknown" in caught.value.message
    assert caught.value.hint == "skyfab trust --hosts=node1"
    assert known_hosts.read_text() == "", "nothing is recorded without being asked"


@both
def test_a_changed_key_is_refused_and_says_so(
    lab: Lab, stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    host = stranger(by)
    record(known_hosts, (place(host), lab.hosts[1].host_key))
    with pytest.raises(sky.HostKeyRefused) as caught:
        pool_of(host).open()
    assert "not the one on record" in caught.value.message
    assert re.search(r"skyfab trust --hosts=node1 --replace", caught.value.hint or "")


@both
def test_marked_and_broken_lines_of_known_hosts_are_not_in_the_way(
    lab: Lab, stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    """People who use host certificates, or have revoked a key of another host, have such lines. Names may be hashed."""
    host = stranger(by)
    other, own = lab.hosts[1].host_key, lab.hosts[0].host_key
    record(known_hosts, (place(host), own))
    subprocess.run(["ssh-keygen", "-H", "-f", str(known_hosts)], check=True, capture_output=True)
    known_hosts.with_suffix(".old").unlink()
    assert str(host.address) not in known_hosts.read_text()
    known_hosts.write_text(
        f"# a comment\n\n@cert-authority *.example.org {other}\n@revoked * {other}\nbroken ssh-ed25519 AAAA!\n"
        f"{known_hosts.read_text()}"
    )
    with pool_of(host) as compute:
        assert len(where() >> compute) == 3


@both
def test_a_revoked_key_is_refused_and_says_so(
    lab: Lab, stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    host = stranger(by)
    key = lab.hosts[0].host_key
    known_hosts.write_text(f"@revoked * {key}\n{place(host)} {key}\n")
    with pytest.raises(sky.HostKeyRefused, match="revoked") as caught:
        pool_of(host).open()
    assert "trust" not in str(caught.value)


@both
def test_a_wrong_key_in_the_inventory_is_refused(
    lab: Lab, stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    """Even where known_hosts has the right one; `skyfab trust` cannot mend it, so the hint names the key to change."""
    host = stranger(by)
    record(known_hosts, (place(host), lab.hosts[0].host_key))
    with pytest.raises(sky.HostKeyRefused) as caught:
        pool_of(replace(host, host_key=lab.hosts[1].host_key)).open()
    assert "not the one on record" in caught.value.message
    assert "host_key" in (caught.value.hint or "")
    assert "trust" not in (caught.value.hint or "")
    record(known_hosts, (place(host), lab.hosts[1].host_key))
    with pool_of(replace(host, host_key=lab.hosts[0].host_key)) as compute:
        assert len(where() >> compute) == 3


def test_a_wrong_key_in_the_inventory_is_refused_where_the_user_shares_a_connection(
    lab: Lab, stranger: Callable[[str], sky.Host], ssh_config: Callable[[str], None], tmp_path: Path
) -> None:
    """A ControlMaster of the user's checked the host's key by the user's rules, or not at all."""
    host = stranger("openssh")
    master = str(tmp_path / "master")
    ssh_config(f"Host *\n  ControlPath {master}\n")
    words = ["ssh", "-F", os.environ["SKYFAB_SSH_CONFIG"], "-o", "StrictHostKeyChecking=no", "-i", str(host.identity)]
    place = ["-p", str(host.port or 22), f"{host.user}@{host.address}"]
    subprocess.run([*words, "-MNf", *place], check=True, capture_output=True)
    try:
        with pytest.raises(sky.HostKeyRefused):
            pool_of(replace(host, host_key=lab.hosts[1].host_key)).open()
    finally:
        subprocess.run([*words, "-O", "exit", *place], check=True, capture_output=True)


# ---- the Fabric connection of a node


@both
def test_the_fabric_connection_refuses_unknown_keys_too(
    lab: Lab, stranger: Callable[[str], sky.Host], known_hosts: Path, by: str
) -> None:
    host = stranger(by)
    record(known_hosts, (place(host), lab.hosts[0].host_key))
    with pool_of(host) as compute:
        known_hosts.write_text("")
        with pytest.raises((paramiko.SSHException, sky.HostKeyRefused), match="known"):
            compute.hosts[0].connection.run("hostname", hide=True, in_stream=False)


@pytest.mark.parametrize("used", [False, True])
def test_a_stream_that_no_connection_uses_ends_with_its_program(used: bool) -> None:
    """Its host may not respond: then ssh would wait forever. If a connection uses it, the host can tell why it ends."""
    program = (
        "from skyfab.ssh.process import ProcessStream;"
        "stream = ProcessStream(['sleep', '600'], lambda code, text: OSError(text));"
        f"stream.is_used = {used}; print(stream._process.pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60).stdout)

    def runs() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
        except OSError:
            return False

    if used:
        assert runs()
        os.kill(pid, signal.SIGTERM)
    until(lambda: not runs())
