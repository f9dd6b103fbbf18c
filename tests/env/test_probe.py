"""The probe: it says what a host is under every shell, with anything missing, and whatever it says can be read."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage.spot import until

from skyfab.env import probe
from skyfab.env.facts import Facts, Program
from skyfab.lab import Lab, LabHost

SHELLS = {"dash": ["dash"], "bash": ["bash"], "ksh": ["ksh"], "mksh": ["mksh"], "busybox": ["busybox", "sh"], "zsh": []}
EVAL = 'c=$1; (eval "$2"); cat'
"""As the launcher does; what is left of stdin comes last."""
TOOLS = ("sh", "cat", "df", "getconf", "grep", "id", "mkdir", "mv", "rm", "sed", "sleep", "stat", "tr", "true", "uname")
PYTHON = '#!/bin/sh\nshift 5\necho "python $1 3.12.1 $2"\n'
"""A program that answers as an interpreter would."""


@dataclass(frozen=True)
class Place:
    """A folder with programs, a home and a cache, and the script run there."""

    folder: Path
    shell: tuple[str, ...] = ("sh",)
    path: str = os.defpath

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def cache(self) -> Path:
        return self.folder / "my 'cache' \"$(touch pwned)\" é"

    def program(self, name: str, text: str) -> Path:
        """Puts a program first on the PATH."""
        file = self.folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
        return file

    def only(self, *tools: str) -> Place:
        """With these on the PATH, what any host has, and no more."""
        folder = self.folder / "tools"
        folder.mkdir()
        for tool in (*TOOLS, *tools):
            (folder / tool).symlink_to(found(tool))
        return replace(self, path=str(folder))

    def run(self, *indexes: str, python: str = "") -> Facts:
        self.home.mkdir(exist_ok=True)
        done = subprocess.run(
            [*self.shell, "-c", EVAL, "probe", str(self.cache), probe.script(indexes, python)],
            env={"PATH": f"{self.folder}/bin:{self.path}", "HOME": str(self.home)},
            cwd=self.home,
            input="left",
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        assert f"\n{done.stdout}".endswith("\nleft"), "it read our stdin"
        assert not list(self.home.iterdir()), "it wrote outside its cache"
        return probe.parse(done.stdout.removesuffix("left"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def found(tool: str) -> str:
    """Where a program of this machine is."""
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"no {tool} on this machine")
    return path


def running(words: str) -> bool:
    """Whether a process of this machine has these words in its command line."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                return True
        except OSError:  # it ended while we looked
            continue
    return False


# ---- what it finds


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_says_the_same_of_this_machine(shell: str, tmp_path: Path) -> None:
    """Below a cache path with spaces, quotes and more."""
    words = SHELLS[shell]
    if not words:
        words = [str(tmp_path / "sh")]  # it is POSIX under this name only
        Path(words[0]).symlink_to(found(shell))
    found(words[0])
    place = Place(tmp_path, tuple(words), f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    place.program("uv", "#!/bin/sh\necho uv 1.2.3 '(some day)'\n")
    facts = place.run()
    here = platform.uname()
    assert (facts.system, facts.arch) == (here.system, here.machine)
    assert facts.libc == " ".join(platform.libc_ver())
    assert facts.boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.cache == str(place.cache)
    assert abs(facts.free - shutil.disk_usage(tmp_path).free) < 4 << 30
    assert not facts.noexec
    assert facts.uv == Program(path=f"{tmp_path}/bin/uv", version="1.2.3")
    base = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    assert facts.pythons[0] == Program(path=base, version=sys.version.split()[0])
    assert len({python.path for python in facts.pythons}) == len(facts.pythons)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.skipif(Path("/proc/driver/nvidia/version").exists(), reason="the kernel says it itself")
def test_the_driver_is_as_nvidia_smi_says_where_the_kernel_does_not(place: Place) -> None:
    place.program("nvidia-smi", "#!/bin/sh\necho 550.54.15\necho 550.54.15\n")
    assert place.run().driver == "550.54.15"


@pytest.mark.parametrize("tool", ["timeout", "no timeout"])
@pytest.mark.slow
def test_an_interpreter_that_hangs_or_fails_is_left_out(place: Place, tool: str) -> None:
    """And what hung is ended."""
    mark = f"{time.time_ns() % 10**9}"
    wait = f"sleep {mark}\n" if tool == "timeout" else f"exec sleep {mark}\n"  # only `timeout` ends a whole group
    place.program("python3", f"#!/bin/sh\n{wait}")
    place.program("python", "#!/bin/sh\necho Segmentation fault\nexit 139\n")
    place.program("python3.10", "#!/bin/sh\necho python 1 2.7.18 /usr/bin/python2; echo; echo rubbish 1 2 3\n")
    place.program("python3.11", "no program at all")
    good = place.program("python3.12", PYTHON)
    facts = place.only(*([tool] if tool == "timeout" else [])).run()
    assert Program(path=str(good), version="3.12.1") in facts.pythons
    assert [python.path for python in facts.pythons if python.path.startswith(f"{place.folder}/")] == [str(good)]
    assert not running(f"sleep {mark}")


# ---- which indexes answer


class Index(BaseHTTPRequestHandler):
    """Answers that it will not."""

    def do_HEAD(self) -> None:
        self.send_error(403)

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.fixture
def closed() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"


@pytest.mark.parametrize("tool", ["curl", "python", "python with timeout"])
def test_an_index_is_reachable_if_it_answers_at_all(
    place: Place, tool: str, index: str, closed: str, silent: str
) -> None:
    hostile = index + "/$(touch${IFS}pwned)/';touch${IFS}pwned;#\"`id`\\{a,b}[1-9]*"
    needs = {"python": [], "python with timeout": ["timeout"]}.get(tool, [tool])
    place = place.only(*needs)
    python = str(place.program("python3", f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n"))
    asked = [index + "/simple/", closed, hostile, "http://"]
    more = [silent] if tool == "curl" else []
    expected = {index + "/simple/", hostile}
    until(lambda: set(place.run(*asked, *more, python=python).reachable) == expected)  # it has two seconds
    assert not list(place.folder.rglob("pwned"))


# ---- on hosts


def on(host: LabHost, cache: str, *, user: str | None = None, root: str | None = None) -> Facts:
    inside = ["chroot", root] if root else []
    done = host.run([*inside, "/bin/sh", "-c", EVAL, "probe", cache, probe.script()], user=user)
    assert done.stderr == ""
    return probe.parse(done.stdout)


@pytest.fixture
def mounted(namespaces: Lab) -> Iterator[Callable[..., LabHost]]:
    """``mounted("-t", "tmpfs", "tmpfs", "/mnt")``: a host with that, until the test is over."""
    host, made = namespaces.hosts[0], list[str]()

    def mount(*words: str) -> LabHost:
        host.run(["mount", *words])
        made.append(words[-1])
        return host

    yield mount
    for path in reversed(made):
        host.run(["umount", "-l", path])


@pytest.mark.lab
def test_the_cache_folders_own_disk_counts(namespaces: Lab, mounted: Callable[..., LabHost]) -> None:
    """Its size and what it forbids, also below a name with a space and before the folder is there."""
    namespaces.hosts[0].run(["mkdir", "-p", "/srv/big disk"])
    host = mounted("-t", "tmpfs", "-o", "size=5m,noexec", "tmpfs", "/srv/big disk")
    facts = on(host, "/srv/big disk/not/yet", user="ada")
    assert facts.noexec
    assert 4 << 20 < facts.free <= 5 << 20


@pytest.mark.lab
def test_drivers_are_found_without_their_tools(namespaces: Lab, mounted: Callable[..., LabHost]) -> None:
    """NVIDIA's as the kernel shows it, where nvidia-smi fails, and ROCm."""
    host = namespaces.hosts[0]
    mounted("-t", "tmpfs", "tmpfs", "/proc/driver")
    mounted("-t", "tmpfs", "tmpfs", "/opt")
    files = {
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release\n",
        "/opt/rocm/.info/version": "6.2.1-45",
        "/usr/local/bin/nvidia-smi": "#!/bin/sh\nexit 9\n",
    }
    for path, text in files.items():
        host.run(["sh", "-c", 'mkdir -p "${1%/*}"; cat >"$1"; chmod 755 "$1"', "put", path], stdin=text)
    try:
        facts = on(host, "/srv/cache")
    finally:
        host.run(["rm", "-f", "/usr/local/bin/nvidia-smi"])
    assert (facts.driver, facts.rocm) == ("560.35.03", "6.2.1-45")


@pytest.fixture
def bare(namespaces: Lab) -> Iterator[Path]:
    """A root folder on the first host with busybox and nothing else, not even /proc."""
    host, busybox = namespaces.hosts[0], found("busybox")
    root = host.path("/srv/bare")
    for folder in ("bin", "dev"):
        (root / folder).mkdir(parents=True)
    libraries = subprocess.run(["ldd", busybox], capture_output=True, text=True).stdout.split()
    for file in (word for word in libraries if word.startswith("/")):
        (root / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / file[1:])
    shutil.copy(busybox, root / "bin/busybox")
    host.run(["chroot", "/srv/bare", "/bin/busybox", "--install", "-s", "/bin"])
    (root / "dev/null").touch()
    host.run(["mount", "--bind", "/dev/null", "/srv/bare/dev/null"])
    yield root
    host.run(["umount", "-l", "/srv/bare/dev/null"])
    host.run(["rm", "-rf", "/srv/bare"])


@pytest.mark.lab
def test_a_host_without_python_or_proc_is_probed_all_the_same(namespaces: Lab, bare: Path) -> None:
    facts = on(namespaces.hosts[0], "/cache", root="/srv/bare")
    assert (facts.system, facts.arch) == (platform.system(), platform.machine())
    assert (facts.pythons, facts.uv, facts.driver, facts.boot) == ((), None, "", "")
    assert facts.cache == "/cache"


@pytest.mark.lab
def test_programs_that_speak_as_on_a_mac_are_understood(namespaces: Lab, bare: Path) -> None:
    """Its own python3 is left alone where it would open a window."""
    programs = {
        "bin/uname": "echo Darwin arm64",
        "bin/sysctl": "echo '{ sec = 1700000000, usec = 5 } Tue Nov 14 22:13:20 2023'",
        "bin/df": "echo Filesystem; echo 'map my home  971350180 99  4000   63%    /System/My Data'",
        "bin/xcode-select": "exit 2",
        "bin/timeout": "exit 127",
        "usr/bin/python3": "echo opened >/window",
        "opt/homebrew/bin/python3.12": PYTHON.partition("\n")[2],
    }
    for path, text in programs.items():
        (bare / path).parent.mkdir(parents=True, exist_ok=True)
        (bare / path).unlink(missing_ok=True)
        (bare / path).write_text(f"#!/bin/sh\n{text}\n")
        (bare / path).chmod(0o755)
    facts = on(namespaces.hosts[0], "/cache", root="/srv/bare")
    assert (facts.system, facts.arch, facts.libc) == ("Darwin", "arm64", "")
    assert facts.pythons == (Program(path="/opt/homebrew/bin/python3.12", version="3.12.1"),)
    assert (facts.boot, facts.free) == ("1700000000", 4000 * 1024)
    assert not (bare / "window").exists()


# ---- how it is read

MAC = """Last login: Tue
system Darwin
arch arm64
libc sh: ldd: command not found
python 7 3.12.1 /opt/homebrew/opt/python@3.12/bin/python3.12
python 2 3.9.6 /usr/bin/python3
python 1 3.11.7 /Users/ada/with space/python3.11
boot 1700000000
disk map auto home   971350180 9999999  400000000   63%    /System/Volumes/Data
"""


@pytest.mark.parametrize(
    ("line", "libc"),
    [
        ("glibc 2.36 glibc 2.36", "glibc 2.36"),
        ("ldd (Debian GLIBC 2.36-9+deb12u4) 2.36 Copyright (C) 2022", "glibc 2.36"),
        ("ldd (GNU libc) 2.34 Copyright", "glibc 2.34"),
        ("musl libc (x86_64) Version 1.2.4", "musl 1.2.4"),
        ("glibc 2.100000", ""),
        ("musl libc (x86_64) Version 1.999999999", ""),
        ("musl libc (x86_64) Version 1.2.4_git20230717", "musl 1.2.4"),
        ("sh: ldd: not found", ""),
    ],
)
def test_a_libc_is_named_by_the_program_that_knows_it(line: str, libc: str) -> None:
    assert probe.parse(f"libc {line}").libc == libc


KEYS = (
    *("python", "uv", "driver", "nvrm", "rocm", "libc", "system", "arch", "boot", "cache", "disk", "mount"),
    *("index", "other"),
)
values = st.one_of(st.text(), st.from_regex(r"[0-9 .,%/()a\n]{0,40}"), st.sampled_from(MAC.splitlines()))


lines = st.lists(st.tuples(st.sampled_from(KEYS), values).map(" ".join)).map("\n".join)


@given(st.one_of(st.text(), lines))
def test_nothing_that_is_said_raises(text: str) -> None:
    facts = probe.parse(text)
    assert not any(sign in repr(facts) for sign in ("\\x1b", "\\x00", "\x1b"))


@pytest.mark.parametrize("key", ["", "python", "libc", "nvrm", "disk", "mount", "index"])
def test_a_flood_is_cut_short(key: str) -> None:
    """Also one that a regular expression could lose its way in."""
    for unit in ("\n", f"\n{key} x", f"\n{key} a, 1, 1.1", "x", " ", ", ", " (", "9 ", "9", "9.", "1% "):
        facts = probe.parse(f"{key} " + unit * ((1 << 20) // len(unit)))
        assert len(facts.pythons) <= 64 and len(facts.reachable) <= 64
        assert len(repr(facts)) < 64 * 1024
