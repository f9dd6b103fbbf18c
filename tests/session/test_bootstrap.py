"""launch: the first command gets through every login shell, and its answer is found in whatever they print."""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage.fakes import Listener
from stage.threads import at_once

import skyfab as sky
from skyfab._util.scripts import spelled
from skyfab.env import uv
from skyfab.inventory.host import Host
from skyfab.protocol import messages
from skyfab.session import bootstrap as launch_module
from skyfab.session.bootstrap import Bootstrap, local_python, open_shell
from skyfab.session.bundle import bundle
from skyfab.session.reader import SharedReader
from skyfab.session.session import Session
from skyfab.session.shell import Deadline, ScriptFailed, Shell
from skyfab.session.timing import Timing
from skyfab.ssh.local import Local

SESSION = "0123456789abcdef"

LOGIN_SHELLS = {
    name: [path, *words]
    for name, program, *words in (
        ("sh", "sh"),
        ("dash", "dash"),
        ("bash", "bash"),
        ("busybox", "busybox", "sh"),
        ("ksh", "ksh"),
        ("zsh", "zsh"),
        ("tcsh", "tcsh"),
        ("fish", "fish"),
    )
    if (path := shutil.which(program))
}
"""Those that are here, as they are called with ``-c``; sshd calls the user's so."""

POSIX_SHELLS = {name: argv for name, argv in LOGIN_SHELLS.items() if name in ("sh", "dash", "bash", "busybox")}
"""What /bin/sh is on one system or another."""

HOSTILE = [
    "",
    "  spaces  ",
    "it's",
    'say "hi"',
    "back\\slash",
    "\\",
    "\\n",
    "\\0101",
    "\\c",
    "%s%d%%",
    "$HOME",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "> pwned",
    "a\nb",
    "\n\n",
    "a\ttab",
    "a\rb",
    "!!",
    "*",
    "[a-z]*",
    "{a,b}",
    "~",
    "~root",
    "#comment",
    "-n",
    "=ls",
    "^x^y",
    "<(x)",
    "7up after an escape: \x017",
    "ünïcödé",
    "\N{GRINNING FACE}",
    "\x7f\x1b[31m",
    "all'of\"it\n$(x)`y`\\!; *",
]


def say_back(login: Sequence[str], inner: Sequence[str], words: list[str]) -> list[str]:
    """Passes words through a login shell to an inner sh, spelled and read back as `Launch.command` does it."""
    script = 'd() { printf %bx $1; }; for w; do c=$(d $w); c=${c%x}; printf %s=END= "$c"; done'
    line = f"exec {' '.join(inner)} -c '{script}' skyfab " + " ".join(f"'{spelled(word)}'" for word in words)
    done = subprocess.run([*login, "-c", line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stderr == b""
    return done.stdout.decode().split("=END=")[:-1]


PAIRS = {
    f"{login} {inner}": (LOGIN_SHELLS[login], POSIX_SHELLS[inner])
    for login in LOGIN_SHELLS
    for inner in POSIX_SHELLS
    if "sh" in (login, inner)
}


@pytest.mark.parametrize(("login", "inner"), PAIRS.values(), ids=PAIRS)
def test_hostile_words_come_through_every_login_shell(
    login: list[str], inner: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the login shell, and whatever /bin/sh is: the word arrives, and nothing in it is carried out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [word for word in HOSTILE if word]
    assert say_back(login, inner, words) == words
    assert not (tmp_path / "pwned").exists()


@settings(deadline=None, max_examples=25)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), min_size=1, max_size=20))
def test_any_text_comes_back_from_the_shell(words: list[str]) -> None:
    words = [word.replace("=END=", "") or "x" for word in words]
    for inner in POSIX_SHELLS.values():
        assert say_back(["/bin/sh"], inner, words) == words


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.binary().map(os.fsdecode)))
def test_a_spelled_word_has_only_harmless_characters(word: str) -> None:
    """Nothing that any shell looks at inside single quotes; names that are not UTF-8 can be spelled too."""
    assert set(spelled(word)) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789/._~-\\")


def test_the_script_is_safe_inside_single_quotes_of_any_shell() -> None:
    """No quote, exclamation mark, backslash or newline: tcsh, fish and zsh have ideas about those."""
    assert not set("'!\\\n") & set(launch_module._SCRIPT)
    assert launch_module._SCRIPT.isascii(), "a login shell may have no locale"


# ---- the command itself, with an interpreter that only says what it was given


@pytest.fixture
def hostile_home(tmp_path: Path) -> Path:
    home = tmp_path / 'a home\'s "folder"\n$(touch pwned); \\x ü!'
    home.mkdir()
    return home


def fake_interpreter(folder: Path) -> Path:
    """An interpreter that writes down its arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "py'th\"on\n !\\"
    path.write_text(
        f"#!{sys.executable} -I\n"
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['SKYFAB_UMASK'], os.getcwd()]))\n"
    )
    path.chmod(0o700)
    return path


def run(shell: Sequence[str], made: Bootstrap, home: Path, **env: str) -> tuple[list[str], list[Any]]:
    """What the shell prints before the interpreter speaks, and what that was given."""
    # fish takes names that are not ASCII apart where there is no locale at all.
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **env}
    done = subprocess.run([*shell, "-c", made.command()], capture_output=True, env=environ, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    *before, last = done.stdout.decode().rstrip("\n").split("\n")
    return before, json.loads(last)


@pytest.mark.parametrize("shell", LOGIN_SHELLS.values(), ids=LOGIN_SHELLS)
def test_the_command_runs_the_right_interpreter_with_the_right_words(shell: list[str], hostile_home: Path) -> None:
    """A home, a cache and an interpreter whose paths hold everything a shell could trip over."""
    python = fake_interpreter(hostile_home / "bin")
    host = Host(name="node", cache="~/my 'cache' $(x) ü")
    made = Bootstrap(host=host, session=SESSION, bundle=bundle(), python=str(python))
    before, (argv, umask, _) = run(shell, made, hostile_home)
    assert before == [f"=skyfab={SESSION}=bundle"]
    assert argv[:2] == ["-S", "-c"]
    assert argv[3:] == [f"{hostile_home}/my 'cache' $(x) ü", bundle().digest, SESSION, "start"]
    assert int(umask, 8) == _umask()
    folder = hostile_home / "my 'cache' $(x) ü" / "bundles" / bundle().digest
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text("pass")
    before, (argv, _, _) = run(shell, made, hostile_home)
    assert before == [f"=skyfab={SESSION}=python"], "a bundle that is there is started at once"
    assert argv == ["-S", str(folder), f"{hostile_home}/my 'cache' $(x) ü", SESSION, "start"]
    assert not list(hostile_home.parent.rglob("pwned"))


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of another user")
def test_a_bundle_of_another_user_is_not_started(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "bundles" / bundle().digest
    folder.mkdir(parents=True)
    (folder / "__main__.py").write_text("pass")
    host = Host(name="node", cache=str(tmp_path / "cache"))
    python = fake_interpreter(tmp_path / "bin")
    made = Bootstrap(host=host, session=SESSION, bundle=bundle(), python=str(python))
    assert run(["/bin/sh"], made, tmp_path)[0] == [f"=skyfab={SESSION}=python"]
    os.chown(folder / "__main__.py", 65534, 65534)
    assert run(["/bin/sh"], made, tmp_path)[0] == [f"=skyfab={SESSION}=bundle"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs links of another user")
@pytest.mark.parametrize("link", ["cache", "above"])
def test_nothing_is_written_through_a_link_of_another_user(tmp_path: Path, link: str) -> None:
    """Its owner can make it lead elsewhere between a check and a write."""
    cache = tmp_path / "above" / "cache" if link == "above" else tmp_path / "cache"
    (tmp_path / "own" / "cache").mkdir(parents=True, mode=0o700)
    (tmp_path / link).symlink_to(tmp_path / "own" / ("" if link == "above" else "cache"))
    home = tmp_path / "home"
    home.mkdir()
    made = Bootstrap(host=Host(name="node", cache=f"{cache}/"), session=SESSION, bundle=bundle(), python="none")
    assert answer(made, HOME=str(home)) == "nopython", "a link of this user is followed"
    os.chown(tmp_path / link, 65534, 65534, follow_symlinks=False)
    assert "failed its cache folder is reached through a link of another user" in answer(made, HOME=str(home))
    assert answer(made, HOME=str(cache)) == "nopython", "as the administrator has set it up"
    assert not list((tmp_path / "own" / "cache").iterdir())


@pytest.mark.parametrize("link", [True, False])
def test_nothing_is_written_below_a_folder_that_others_can_write_to(tmp_path: Path, link: bool) -> None:
    """They could replace a bundle between a check and its use. A folder like /tmp, with the sticky bit, is none."""
    shared, home = tmp_path / "shared", tmp_path / "home"
    (shared / "own").mkdir(parents=True)
    home.mkdir()
    (home / ".cache").symlink_to(shared / "own")
    cache = "~/.cache/skyfab" if link else str(shared / "own" / "skyfab")
    made = Bootstrap(host=Host(name="node", cache=cache), session=SESSION, bundle=bundle(), python="none")
    shared.chmod(0o777)
    assert f"failed its cache folder is in {shared}, which is writable by others" in answer(made, HOME=str(home))
    shared.chmod(0o1777)
    assert answer(made, HOME=str(home)) == "nopython"
    if os.getuid() == 0:
        os.chown(shared, 65534, 65534)
        assert f"failed its cache folder is in {shared}, which belongs to another user" in answer(made, HOME=str(home))


def test_the_cache_is_there_and_closed_to_others_before_it_is_looked_at(tmp_path: Path) -> None:
    """Below a folder that all may write to, another user could make it between the look and its use."""
    cache = tmp_path / "open" / "deep" / "cache"
    (tmp_path / "bin").mkdir()
    look = tmp_path / "bin" / "ls"
    look.write_text(f'#!/bin/sh\nstat -c %a "{cache}" "{cache.parent}" >"{tmp_path}/modes"\nexec /bin/ls "$@"\n')
    look.chmod(0o700)
    made = Bootstrap(host=Host(name="node", cache=str(cache)), session=SESSION, bundle=bundle(), python="none")
    answer(made, PATH=f"{tmp_path}/bin:{os.environ['PATH']}", HOME=str(tmp_path))
    assert (tmp_path / "modes").read_text().split() == ["700", "700"]


def test_the_cache_is_where_the_inventory_says(tmp_path: Path) -> None:
    python = fake_interpreter(tmp_path / "bin")
    for cache, place in ((f"{tmp_path}/abs/x", f"{tmp_path}/abs/x"), ("~/x", f"{tmp_path}/x"), ("~", f"{tmp_path}")):
        host = Host(name="node", cache=cache)
        made = Bootstrap(host=host, session=SESSION, bundle=bundle(), python=str(python))
        _, (argv, _, _) = run(["/bin/sh"], made, tmp_path)
        assert argv[3].rstrip("/") == place


def answer(made: Bootstrap, **env: str) -> str:
    done = subprocess.run(["/bin/sh", "-c", made.command()], capture_output=True, env=env, stdin=subprocess.DEVNULL)
    return done.stdout.decode().strip().rpartition("=")[2]


def test_an_interpreter_is_found_by_its_version(tmp_path: Path) -> None:
    """python3.11 first, then python3 and python if that is what they are."""
    made = Bootstrap(host=Host(name="node", cache=str(tmp_path)), session=SESSION, bundle=bundle(), python="3.11")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("python", "python3", "python3.11"):
        (bin_ / name).write_text(f"#!/bin/sh\ntest $1 = -Sc && echo 3.11 || echo ={name}\n")
        (bin_ / name).chmod(0o700)
        assert answer(made, PATH=str(bin_), HOME=str(tmp_path)) == name


@pytest.mark.parametrize("python", ["3.11", "/no/such/python", "/etc/passwd", "/usr"])
def test_a_host_without_that_python_says_so(python: str, tmp_path: Path) -> None:
    """None on the PATH, none at that path, a file that is no program, or the folder of a virtual environment."""
    made = Bootstrap(host=Host(name="node", cache=str(tmp_path)), session=SESSION, bundle=bundle(), python=python)
    (tmp_path / "empty").mkdir()
    assert answer(made, PATH=str(tmp_path / "empty"), HOME=str(tmp_path)) == "nopython"


# ---- reading the answer


class Script:
    """A stream that a test writes; the seam between launch and transports."""

    def __init__(self, said: bytes, *, end: bool = True, why: str = "the connection ended") -> None:
        self._why = why
        self._source, sink = os.pipe()
        os.set_blocking(self._source, False)
        self.taken = bytearray()
        self._sink = sink
        self._writer = threading.Thread(target=self._write, args=(said, end))
        self._writer.start()

    def _write(self, said: bytes, end: bool) -> None:
        rest = memoryview(said)
        while rest:
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BrokenPipeError:
                break
        if end:
            os.close(self._sink)
            self._sink = -1

    def fileno(self) -> int:
        return self._source

    def sink(self) -> int | None:
        return None

    def stderr(self) -> int | None:
        return None

    def drain(self) -> None: ...

    def recv_into(self, view: memoryview) -> int:
        return os.readv(self._source, [view])

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        data = b"".join(buffers)
        self.taken += data
        return len(data)

    def explain(self) -> Exception:
        return sky.HostLost(self._why, host="node")

    def close(self) -> None:
        os.close(self._source)
        self._writer.join()
        if self._sink >= 0:
            os.close(self._sink)


def join(
    said: bytes, *, end: bool = True, seconds: float = 20, why: str = "the connection ended", **options: Any
) -> Script:
    about: dict[str, Any] = {"host": Host(name="node"), "python": local_python(), **options}
    made = Bootstrap(session=SESSION, bundle=bundle(), **about)
    stream = Script(said, end=end, why=why)
    try:
        made.join(stream, deadline=time.monotonic() + seconds)
    finally:
        stream.close()
    return stream


MARK = f"=skyfab={SESSION}=".encode()


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"Welcome to node!\n",
        b"bash: warning: setlocale: LC_ALL: cannot change locale\n",
        b"no newline at the end",
        b"\x1b[2J\x1b[H\x00\xff\xfe binary \r\n",
        b"=skyfab=",
        b"=skyfab=another=link\n",
        b"=skyfab=0123456789abcde=link\n",
        b"=skyfab=0123456789abcdef\n",
        b"==skyfab==skyfab=0123",
        b"x" * 200_000,
    ],
    ids=lambda noise: repr(noise[:30]),
)
def test_the_answer_is_found_behind_whatever_is_printed_first(noise: bytes) -> None:
    """A .bashrc that greets, warns or clears the screen; or that happens to print our name."""
    assert join(noise + MARK + b"link\n").taken == b""


def test_what_follows_the_answer_is_left_for_the_frames() -> None:
    made = Bootstrap(host=Host(name="node"), session=SESSION, bundle=bundle(), python=local_python())
    stream = Script(b"hello\n" + MARK + b"link\nFRAMES")
    made.join(stream, deadline=time.monotonic() + 20)
    rest = bytearray(100)
    assert bytes(rest[: stream.recv_into(memoryview(rest))]) == b"FRAMES"
    stream.close()


def test_the_bundle_is_sent_when_it_is_asked_for() -> None:
    stream = join(MARK + b"bundle\n" + MARK + b"link\n")
    assert bytes(stream.taken).endswith(bundle().archive)
    size, _, rest = bytes(stream.taken).partition(b"\n")
    assert compile(rest[: int(size)], "unpack", "exec")


@pytest.mark.parametrize(
    ("said", "error", "text"),
    [
        (MARK + b"nopython\n", sky.HostUnfit, "no Python"),
        (MARK + b"failed [Errno 28] No space left on device\n", sky.HostUnfit, "No space left"),
        (MARK + b"failed [Errno 30] Read-only file system\n", sky.HostUnfit, "cannot set up skyfab"),
        (MARK + b"something else entirely\n", sky.HostUnfit, "cannot set up skyfab"),
        (b"This account is currently not available.\n", sky.HostUnfit, "not available"),
        (b"", sky.HostUnfit, "did not run our command"),
        (MARK + b"li", sky.HostUnfit, "did not run our command"),
        (b"x" * 400_000, sky.HostUnfit, "prints endlessly"),
        (MARK + b"x" * 400_000, sky.HostUnfit, "prints endlessly"),
    ],
    ids=["no python", "full", "read-only", "unknown", "nologin", "silent", "cut", "endless", "endless answer"],
)
def test_a_host_that_cannot_says_so_with_a_hint(said: bytes, error: type[sky.HostError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        join(said)
    assert caught.value.host == "node"
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("why", "text", "hint"),
    [
        ("ended: skyfab: the disk is full", "cannot set up skyfab: the disk is full", "free some space"),
        ("ended: 3.6.8", f"it runs Python 3.6.8: hosts must run .* {local_python()}", "name a Python"),
        ("ended: Illegal instruction", "its Python cannot run skyfab: Illegal instruction", "name one"),
        ("ended", r"its Python cannot run skyfab\n", "name one"),
    ],
)
def test_an_interpreter_that_ends_says_why(why: str, text: str, hint: str) -> None:
    with pytest.raises(sky.HostUnfit, match=text) as caught:
        join(MARK + b"bundle\n", why=why)
    assert str(caught.value.hint).startswith(hint)


def test_an_interpreter_is_installed_only_where_it_is_missing() -> None:
    def prepare(shell: Shell) -> str | None:
        prepared.append(shell.host.name)
        return shell.answer()

    prepared: list[str] = []
    join(MARK + b"link\n", prepare=prepare)
    assert prepared == []
    join(MARK + b"nopython\n" + MARK + b"link\n", prepare=prepare)
    assert prepared == ["node"]
    with pytest.raises(sky.HostUnfit, match="no Python"):
        join((MARK + b"nopython\n") * 2, prepare=prepare)
    assert prepared == ["node"] * 2, "once for each login"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"no login\n", "did not run our command; it said: no login"),
        (MARK + b"setup 1\n", "its setup failed"),
        (MARK + b"failed no space\n", "no space"),
    ],
)
def test_a_shell_that_is_to_be_prepared_first_and_does_not_start(said: bytes, text: str) -> None:
    with pytest.raises(sky.HostUnfit, match=text):
        join(said, python="none", prepare=lambda shell: shell.run("true"))


def test_a_host_that_says_nothing_is_given_up_in_time() -> None:
    with pytest.raises(sky.Unreachable, match="no response in time"):
        join(b"Welcome\n", end=False, seconds=0.3)


# ---- scripts in the shell


@pytest.fixture
def shell_here(tmp_path: Path) -> Iterator[Shell]:
    host = Host(name="node", cache=str(tmp_path))
    with open_shell(host, Local(host)) as shell:
        yield shell


def test_scripts_run_one_after_another(shell_here: Shell, tmp_path: Path) -> None:
    assert shell_here.run("echo one; echo >&2; printf '$c'; printf three") == "one\n\n$cthree"
    assert shell_here.run('echo "$c"; cat') == str(tmp_path)
    for status in (7, 127):
        with pytest.raises(ScriptFailed, match=r"^no$") as caught:
            shell_here.run(f"echo no; exit {status}")
        assert caught.value.status == status
    assert shell_here.run("head -c 2700000 | wc -c", feed=[bytes(300_000)] * 9).strip() == "2700000"
    assert shell_here.run("true") == ""


def test_a_script_that_fails_is_sent_no_more_of_its_input(shell_here: Shell) -> None:
    with pytest.raises(ScriptFailed, match=r"^enough$"):
        shell_here.run("head -c 1000000 >/dev/null; echo enough; exit 1", feed=itertools.repeat(bytes(100_000)))
    with pytest.raises(sky.HostLost):  # what it has left unread is no script
        shell_here.run("echo more")


# ---- all of it


def test_a_whole_session_below_a_hostile_home(hostile_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack, link, agent and answer with a newline, quotes and $(…) in every path; then nothing is left running."""
    monkeypatch.setenv("HOME", str(hostile_home))
    host = Host(name="local", cache="~/my 'cache'; $(touch pwned)")
    for _ in range(2):  # with an empty cache, and with one that has the bundle
        made = Bootstrap(host=host, session=os.urandom(8).hex(), bundle=bundle(), python=sys.executable)
        session = Session(made, lambda: Local(host), Listener(), SharedReader(), Timing(lease=5))
        agent = session.open()
        try:
            assert agent.python == local_python()
            reply = session.ask(messages.Has(names=[bundle().digest]))
            assert reply == messages.Missing(names=[bundle().digest])
        finally:
            session.close()
        gone(agent.pid)
    cache = hostile_home / "my 'cache'; $(touch pwned)"
    assert [path.name for path in (cache / "bundles").iterdir()] == [bundle().digest]
    assert not [path for path in (cache / "run").rglob("*") if path.is_file()]
    assert not list(hostile_home.parent.rglob("pwned"))


@pytest.mark.parametrize("before", [True, False])
def test_a_cache_made_with_a_umask_of_002_is_not_refused_here(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this program, before it opens a pool on `local`, or by an earlier version."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    host = Host(name="local", transport="local")
    mask = os.umask(0o002)
    try:
        if before:
            (tmp_path / ".cache" / "skyfab").mkdir(parents=True)
        else:
            with uv.making(tmp_path / "file"):
                assert stat.S_IMODE((tmp_path / ".cache" / "skyfab").stat().st_mode) == 0o700
        made = Bootstrap(host=host, session=SESSION, bundle=bundle(), python="none")
        stream = Local(host).open(made.command())
        try:
            assert Shell(stream, made.marker, Deadline(host, time.monotonic() + 30, bool)).answer() == "nopython"
        finally:
            stream.close()
    finally:
        os.umask(mask)


def test_modules_in_the_current_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be /tmp, where other users write, or contain a file of the user with such a name."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in sys.stdlib_module_names:
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(hostile)
    host = Host(name="local", cache=str(tmp_path / "cache"))
    for _ in range(2):  # with an empty cache, and with one that has the bundle
        made = Bootstrap(host=host, session=os.urandom(8).hex(), bundle=bundle(), python=sys.executable)
        session = Session(made, lambda: Local(host), Listener(), SharedReader(), Timing(lease=5))
        try:
            pid = session.open().pid
        finally:
            session.close()
        gone(pid)
    assert not (tmp_path / "ran").exists()


def gone(pid: int) -> None:
    """Waits for a process that is no child of ours; one that only waits for init to notice is gone."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.01)
    raise AssertionError(f"agent {pid} is still there")


def test_a_damaged_bundle_is_not_installed(tmp_path: Path) -> None:
    """The archive is checked before anything is unpacked."""
    archive = bundle().archive
    made = Bootstrap(
        host=Host(name="local", cache=str(tmp_path)), session=SESSION, bundle=bundle(), python=sys.executable
    )
    stream = Local(made.host).open(made.command())

    class Damaging:
        """Flips a bit of the archive on its way."""

        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def send(self, buffers: Sequence[Any]) -> int:
            data = bytearray(b"".join(buffers))
            at = data.find(archive[:1000])
            if at >= 0:
                data[at + 500] ^= 1
            return stream.send([data])

    try:
        with pytest.raises(sky.HostUnfit, match="cannot set up skyfab: the bundle arrived damaged"):
            made.join(Damaging(), deadline=time.monotonic() + 30)
    finally:
        stream.close()
    assert not (tmp_path / "bundles" / bundle().digest).exists()


def test_two_programs_unpack_one_bundle_at_once(tmp_path: Path) -> None:
    """Both get a link, and one bundle is there afterwards."""
    launches = [
        Bootstrap(
            host=Host(name="local", cache=str(tmp_path)),
            session=os.urandom(8).hex(),
            bundle=bundle(),
            python=sys.executable,
        )
        for _ in range(3)
    ]
    reader = SharedReader()
    sessions = [
        Session(made, functools.partial(Local, made.host), Listener(), reader, Timing(lease=5)) for made in launches
    ]
    try:
        found = at_once(lambda session: session.open().pid, sessions)
    finally:
        for session in sessions:
            session.close()
    for pid in found:
        gone(pid)
    (unpacked,) = (tmp_path / "bundles").iterdir()
    assert unpacked.name == bundle().digest
    assert stat.S_IMODE(unpacked.stat().st_mode) == 0o700, "what runs there is readable for its user only"
