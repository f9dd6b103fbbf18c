"""Security: the promises of docs/security.md that no other test proves. The document names the tests for each."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import re
import secrets
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import remote
from stage.remote import linger
from stage.spot import Spot

import skyfab as sky
from skyfab.calls.results import unpack_result
from skyfab.lab import Lab
from skyfab.protocol import codec, messages, plain_data
from skyfab.session.bundle import bundle
from skyfab.ui.events import Event

HOSTILE = """it's "quoted"; $(touch /tmp/pwned) `id` \\ $HOME\n-n ünï\t*\x01!"""
SECRET = secrets.token_hex(16)
"""In no file of the project, which hosts have."""


# ---- results="data": a pool (what it encodes: tests/protocol/test_plain_data.py)


class Calls:
    """Pickled, it is a call of something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.parts = (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


class Thing:
    """Some class of the user's."""


class Broken(Exception):
    """An exception of the user's."""


@sky.function
def returns(value: Any) -> Any:
    return value


@sky.function
def evil_return(mark: str) -> Any:
    return Calls(os.system, f"touch {mark}")


@sky.function
def fails(kind: str) -> None:
    if kind == "builtin":
        raise KeyError("k", 5)
    if kind == "own":
        raise Broken("mine")
    error = ValueError("x")
    error.args = (Calls(os.system, "touch /tmp/skyfab-pwned"),)
    raise error


@pytest.fixture(scope="module")
def untrusted(hosts_of: Callable[..., list[sky.Host]]) -> Iterator[sky.Compute]:
    with sky.Compute(hosts_of("local", 1), ranks=2, results="data", ui="none") as compute:
        yield compute


def test_a_wary_pool_takes_data_on_every_way(untrusted: sky.Compute) -> None:
    np = pytest.importorskip("numpy")
    for value in ({"a": [1, (2.5, None)]}, b"x" * 100_000):
        assert returns(value) >> untrusted == value
        assert returns(value) @ untrusted == [value] * 2
        assert (returns(value) > untrusted).result() == value
    assert untrusted.map(returns, [1, "two", (3,)]) == [1, "two", (3,)]
    assert (returns(np.arange(9000)) >> untrusted).sum() == np.arange(9000).sum()


def test_a_wary_pool_refuses_everything_else_and_names_it(untrusted: sky.Compute, tmp_path: Path) -> None:
    for run in (
        lambda: returns(Thing()) >> untrusted,
        lambda: (returns(Thing()) > untrusted).result(),
        lambda: untrusted.map(returns, [Thing()]),
        lambda: returns([Thing(), bytes(100_000)]) >> untrusted,
    ):
        with pytest.raises(sky.UntrustedResult, match="Thing") as caught:
            run()
        assert caught.value.host == "here1"
        assert 'results="any"' in str(caught.value.hint)
    with pytest.raises(sky.BroadcastError) as many:
        returns(Thing()) @ untrusted
    assert [type(error) for error in many.value.exceptions] == [sky.UntrustedResult] * 2
    with pytest.raises(sky.UntrustedResult, match="Calls"):
        evil_return(str(tmp_path / "mark")) >> untrusted
    assert list(tmp_path.iterdir()) == []
    assert returns(1) >> untrusted == 1, "the pool goes on"


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_is_not_unpickled(tmp_path: Path, plain: bool) -> None:
    """Whatever a host calls it."""
    data = codec.dumps(Calls(os.system, f"touch {tmp_path / 'mark'}")).data
    result = messages.Result(parts=[len(data)], plain=plain)
    with pytest.raises(sky.UntrustedResult) as caught:
        unpack_result(result, [memoryview(data)], host="node1", rank=2, label="f", untrusted=True)
    assert (caught.value.host, caught.value.rank) == ("node1", 2)
    raised = messages.Raised(kind="ValueError", text="x", traceback="", parts=[len(data)], plain=plain)
    with pytest.raises(sky.RemoteError, match="ValueError: x"):
        unpack_result(raised, [memoryview(data)], host="node1", rank=2, label="f", untrusted=True)
    assert list(tmp_path.iterdir()) == []
    codec.loads(data)
    assert (tmp_path / "mark").exists(), "else this proves nothing"


def test_a_run_that_a_wary_pool_launched_keeps_plain_data(untrusted: sky.Compute) -> None:
    assert untrusted.launch(returns({"loss": 0.5}), on="head").result(timeout=170) == {"loss": 0.5}
    with pytest.raises(sky.UntrustedResult, match="Thing"):
        untrusted.launch(returns(Thing()), on="head").result(timeout=170)


def test_a_wary_pool_rebuilds_pythons_own_exceptions_alone(untrusted: sky.Compute) -> None:
    with pytest.raises(KeyError) as own:
        fails("builtin") >> untrusted
    assert own.value.args == ("k", 5)
    assert isinstance(own.value.__cause__, sky.RemoteTraceback)
    for kind, says in (("own", "Broken: mine"), ("hostile", "ValueError")):
        with pytest.raises(sky.RemoteError, match=says) as caught:
            fails(kind) >> untrusted
        assert caught.value.kind.endswith(says.partition(":")[0])
        assert isinstance(caught.value.__cause__, sky.RemoteTraceback)
    assert not Path("/tmp/skyfab-pwned").exists()


STEERING = "\x1b]0;owned\x07\x1b[2J\x9b1A\r"


def steering() -> list[Exception]:
    """Exceptions whose text would set a terminal's title, clear it and move its cursor."""
    import numpy as np

    noted = ValueError("noted")
    noted.__notes__ = [STEERING]
    zone = datetime.timezone(datetime.timedelta(0), STEERING)
    values = (STEERING, pathlib.PurePosixPath(STEERING), zone, np.str_(STEERING))
    missing = ModuleNotFoundError("missing")
    missing.__notes__ = STEERING  # type: ignore[assignment]
    return [*map(ValueError, values), OSError(5, STEERING), ImportError(STEERING, name=STEERING), noted, missing]


@pytest.mark.parametrize("untrusted", [True, False])
@pytest.mark.parametrize("number", range(8))
def test_no_failure_on_a_host_steers_the_terminal_when_python_prints_it(number: int, untrusted: bool) -> None:
    """With ``results="data"`` the exception either; without it a host may do here what it likes anyhow."""
    error = steering()[number]
    raised = messages.Raised(kind="X" + STEERING, text=STEERING, traceback=STEERING, parts=[1], plain=untrusted)
    payload = plain_data.dumps_exception(error) if untrusted else codec.dumps(error)
    buffers = [memoryview(payload.data), *payload.buffers]
    try:
        unpack_result(raised, buffers, host="h", rank=0, label=STEERING, untrusted=untrusted)
    except Exception as found:
        shown = "".join(traceback.format_exception(found))
        cause = str(found.__cause__)
    for text in (shown, cause) if untrusted else (cause,):
        assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f]", text)) - {"\n"}


def test_our_own_errors_steer_no_terminal() -> None:
    """A host's words are in many of them; colours go, and nothing else is lost."""
    failed = sky.HostUnfit(f"\x1b[31mred\x1b[0m {STEERING}\ttab", host="h", hint=STEERING)
    assert str(failed) == f"h: red {ascii(STEERING)[1:-1]}\ttab\nhint: {ascii(STEERING)[1:-1]}"
    group = sky.PoolError(STEERING, [ValueError(STEERING), failed])
    assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f]", str(group))) - {"\n", "\t"}


# ---- words travel as they are


variables = sky.function(remote.variables)


@pytest.mark.parametrize("transport", ["local", "openssh", "fabric"])
def test_values_of_variables_travel_as_they_are(
    open_pool: Callable[..., sky.Compute], tmp_path: Path, transport: str
) -> None:
    """Those of the pool, of the image and of the inventory, to solo calls and to ranks."""
    pool = open_pool(
        transport, env={"A": HOSTILE}, image=sky.Image(env={"B": HOSTILE + "b"}), host={"env": {"C": HOSTILE + "c"}}
    )
    expected = [HOSTILE, HOSTILE + "b", HOSTILE + "c"]
    assert variables("A", "B", "C") >> pool == expected
    assert variables("A", "B", "C") @ pool == [expected]
    assert (sky.function(os.path.exists)("/tmp/pwned") >> pool) is False


def test_a_variable_of_an_inventory_file_travels_as_it_is(tmp_path: Path) -> None:
    inventory = tmp_path / "inventory.toml"
    value = 'it\'s \\"q\\"; $(touch /tmp/pwned)\\n`id`'
    inventory.write_text(f'[hosts.here]\ntransport = "local"\ncache = "{tmp_path}/cache"\nenv = {{ A = "{value}" }}\n')
    with sky.Compute("here", inventory=inventory, ui="none") as pool:
        assert variables("A") >> pool == ['it\'s "q"; $(touch /tmp/pwned)\n`id`']


@pytest.mark.parametrize("env", [{"A=B": "x"}, {"A": "x\0y"}, {"A": 5}, {"$(id)": "x"}])
def test_a_variable_that_cannot_be_is_refused_at_once(env: Any) -> None:
    with pytest.raises(sky.UsageError, match=r"^env: "):
        sky.Compute("local", env=env)


@pytest.mark.parametrize("transport", ["local", "openssh", "fabric"])
def test_a_cache_may_have_any_printable_name(
    open_pool: Callable[..., sky.Compute], tmp_path: Path, transport: str
) -> None:
    """Also while files of the project, functions and blobs are stored there."""
    folder = '/it\'s "a" $(touch pwned); `id` & *{a,b} !x \\ ü'
    place = f"{tmp_path}{folder}" if transport == "local" else f"~{folder}"
    pool = open_pool(transport, host={"cache": place}, workdir="temp" if transport == "local" else "auto")
    assert returns(b"x" * 3_000_000) @ pool == [b"x" * 3_000_000]
    found = sky.function(lambda: [str(Path.cwd()), *(str(p) for p in Path.home().glob("pwned"))])() >> pool
    assert len(found) == 1
    assert f"{folder}/{'run' if transport == 'local' else 'files'}/" in found[0]
    pool.close()
    if transport == "local":
        assert [entry.name for entry in tmp_path.iterdir()] == [folder[1:]]


# ---- secrets


def seen_in(folder: Path, secret: str) -> list[str]:
    """Files with it in their content or name."""
    found = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if secret in path.name or (path.is_file() and secret.encode() in path.read_bytes()):
                found.append(str(path))
    return found


def started_with(secret: str) -> list[str]:
    """Processes of this machine, those of its lab included, that have it in their arguments or environment."""
    found = []
    for file in (*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with contextlib.suppress(OSError):
            if secret.encode() in file.read_bytes():
                found.append(f"{file} {file.with_name('cmdline').read_bytes()!r}")
    return found


@pytest.mark.parametrize("by", ["openssh", "fabric"])
@pytest.mark.slow
def test_a_secret_is_known_to_the_processes_that_need_it_alone(
    namespaces: Lab, open_pool: Callable[..., sky.Compute], spot: Spot, by: str
) -> None:
    """Not to argument lists and environments that `ps` shows, files, events, tracebacks, or what anything prints as."""
    pool = open_pool(
        by,
        user="ada",
        ranks=2,
        env={"TOKEN": SECRET},
        host={"env": {"TOKEN2": SECRET}},
        plugins=[sky.plugins.huggingface(token=SECRET)],
    )
    host = namespaces.hosts[0]
    events: list[Event] = []
    pool.events.subscribe(events.append)
    assert variables("TOKEN", "TOKEN2", "HF_TOKEN") @ pool == [[SECRET] * 3] * 2
    with pytest.raises(RuntimeError) as caught:
        sky.function(remote.stumble)() >> pool
    future = pool.submit(sky.function(linger)(spot / "rank"))
    spot.wait("rank")
    assert any("agent" in " ".join(p.cmdline) or "skyfab" in " ".join(p.cmdline) for p in host.processes())
    assert started_with(SECRET) == []
    cache = host.path("/home/ada/.cache/skyfab")
    assert list(cache.glob("run/*/*/agent.sock")), "the pool is in sight"
    assert list(cache.glob("logs/**/*"))
    assert seen_in(cache, SECRET) == []
    assert seen_in(host.path("/tmp"), SECRET) == []
    node = pool.hosts[0]
    shown = [f"{event} {event!r}" for event in events]
    shown += [repr(pool), repr(node), repr(node.host), repr(node.session), repr(pool.inventory)]
    shown += [repr(pool._images.plugins), repr(pool._images._env), str(caught.value), str(caught.value.__cause__)]
    assert SECRET not in "".join(shown)
    future.cancel()


@pytest.mark.slow
def test_a_detached_run_keeps_no_secret(namespaces: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """What its hosts keep of it are its answers and what it printed."""
    pool = open_pool("openssh", user="ada", env={"TOKEN": SECRET}, plugins=[sky.plugins.huggingface(token=SECRET)])
    run = pool.launch(sky.function(lambda: len(os.environ["TOKEN"] + os.environ["HF_TOKEN"]))(), name="quiet")
    assert run.result(timeout=170) == [2 * len(SECRET)]
    small = pool.launch(sky.function(len)(SECRET), on="one", name="small")  # the whole call is one small message
    assert small.result(timeout=170) == len(SECRET)
    cache = namespaces.hosts[0].path("/home/ada/.cache/skyfab")
    assert list(cache.glob(f"runs/{run.id}/result.*"))
    assert seen_in(cache, SECRET) == []


def test_the_login_that_hosts_see_has_no_secrets_of_this_program(
    open_pool: Callable[..., sky.Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of this process do not go along to a host."""
    monkeypatch.setenv("SKYFAB_TEST_SECRET", SECRET)
    assert variables("SKYFAB_TEST_SECRET") >> open_pool("openssh") == [None]
    assert variables("SKYFAB_TEST_SECRET") >> open_pool("fabric") == [None]


# ---- other users of a host, and its network


@pytest.mark.parametrize("by", ["openssh", "fabric"])
def test_a_run_folder_of_another_user_is_refused(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who guesses a pool's name could make its folder first, and listen at its socket."""
    host = namespaces.hosts[0]
    (target,) = hosts_of(by, 1, user="ada", cache="/tmp/run-folder")
    for owner, mode in (("root", "777"), ("ada", "750")):
        compute = sky.Compute([target], ui="none")
        monkeypatch.setattr("skyfab.pool.nodes.secrets.token_hex", lambda size: "0123456789abcdef")
        place = f"/tmp/run-folder/run/{host.name}/0123456789abcdef-0"
        host.run(["sh", "-c", f"umask 077; mkdir -p {place}; chown -R ada /tmp/run-folder"])
        host.run(["sh", "-c", f"chown {owner} {place}; chmod {mode} {place}"])
        try:
            with pytest.raises(sky.HostError, match="another user or is accessible to others"):
                compute.open()
        finally:
            host.run(["rm", "-rf", "/tmp/run-folder"])


def test_another_user_cannot_reach_an_agent(namespaces: Lab, open_pool: Callable[..., sky.Compute]) -> None:
    """Neither its socket nor what it keeps."""
    host = namespaces.hosts[0]
    host.add_user("eve")
    open_pool("openssh", user="ada")
    (sock,) = host.path("/home/ada/.cache/skyfab").glob("run/*/*/agent.sock")
    inside = "/home/ada/" + str(sock).partition("/home/ada/")[2]
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({inside!r})"
    tried = host.run([host.python, "-c", code], user="eve", check=False)
    assert "PermissionError" in tried.stderr
    assert host.run(["ls", "/home/ada/.cache/skyfab"], user="eve", check=False).returncode != 0


def test_this_program_listens_nowhere(open_pool: Callable[..., sky.Compute]) -> None:
    """While it has pools over every transport, with ranks that have met."""
    for by in ("local", "openssh", "fabric"):
        assert returns(1) @ open_pool(by, ranks=2) == [1, 1]
    ours = {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    listening = [
        line.split()
        for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    ]
    assert [words for words in listening if f"socket:[{words[9]}]" in ours] == []


# ---- the document


@pytest.mark.parametrize("document", ["security.md", "reliability.md", "remote_device.md"])
def test_the_documents_name_tests_that_are_there(document: str) -> None:
    """A promise without its test is none."""
    root = next(folder for folder in Path(__file__).parents if (folder / "docs").is_dir())
    tests = "".join(path.read_text() for path in (root / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (root / "docs" / document).read_text())
    assert [test for test in named if f"\ndef {test}(" not in tests] == []
    assert len(named) > 30


@pytest.mark.parametrize(
    ("owner", "mode", "says"),
    [
        ("eve", "755", "another user"),
        ("ada", "770", "writable"),
    ],
)
def test_a_cache_of_another_user_is_refused(
    namespaces: Lab, hosts_of: Callable[..., list[sky.Host]], owner: str, mode: str, says: str
) -> None:
    """Who can write there could have put a bundle of their own in it: it would run as us."""
    host = namespaces.hosts[0]
    host.add_user("eve")
    cache, mark = "/tmp/cache-of-eve", "/tmp/cache-of-eve-ran"
    place = f"{cache}/bundles/{bundle().digest}"
    script = f'mkdir -p {place}; echo \'open("{mark}", "w")\' >{place}/__main__.py; chmod -R a+rX {cache};'
    host.run(["sh", "-c", f"{script} chown -R {owner} {cache}; chmod {mode} {cache}"])
    try:
        with pytest.raises(sky.HostUnfit, match=says):
            sky.Compute(hosts_of("openssh", 1, user="ada", cache=cache), ui="none").open()
        assert not host.path(mark).exists()
    finally:
        host.run(["rm", "-rf", cache, mark])
