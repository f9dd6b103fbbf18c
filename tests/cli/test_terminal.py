"""What a person sees at a terminal, of several widths and piped, compared as text; and hints, which work when typed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from stage.projects import skyfab as piped
from stage.typist import Typist

from skyfab.lab import Lab

pytestmark = pytest.mark.programs

PROGRAM = [sys.executable, "-m", "skyfab"]
INVENTORY = """
[hosts.here]
transport = "local"
cache = "{cache}/here"
[hosts.dead]
address = "127.0.0.1"
port = 1
user = "root"
tags = ["spare"]
[groups]
both = ["here", "dead"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inventory.toml").write_text(INVENTORY.format(cache=tmp_path))
    (tmp_path / "hello.py").write_text("import os\nprint('hello from', os.environ['RANK'])\n")
    return tmp_path


def seen(folder: Path, columns: int, *words: str, **environ: str) -> tuple[int, str]:
    """The exit code and what a terminal of that width gets, with its control sequences."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ}
    for name in {"COLUMNS", "LINES", "NO_COLOR"} - set(environ):
        env.pop(name, None)
    said = b""
    with subprocess.Popen(
        [*PROGRAM, *words], cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as program:
        os.close(theirs)
        with suppress(OSError):  # the end of a terminal
            while data := os.read(ours, 65536):
                said += data
        code = program.wait(100)
    os.close(ours)
    return code, said.decode().replace("\r\n", "\n")


def text(said: str) -> str:
    """The lines that stay on the screen, without colours."""
    said = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?7[lh]", "", said)
    return "\n".join(line.rpartition("\x1b[J")[2].rstrip() for line in said.split("\n"))


# ---- help and tables


@pytest.mark.parametrize("columns", [60, 160])
def test_hosts_is_a_table_where_there_is_room(folder: Path, columns: int) -> None:
    """The reason of a failure is wrapped, and nothing else; where there is less room, columns are left out."""
    code, said = seen(folder, columns, "hosts", "both")
    lines = text(said).splitlines()
    assert code == 3
    (head,) = [line for line in lines if line.startswith("host ")]
    names = re.split("  +", head)
    assert ("system" in names, "load" in names) == (columns == 160, columns == 160)
    assert names[:2] + names[-2:] == ["host", "address", "GPUs", "state"]
    here, dead = (next(line for line in lines if line.startswith(f"{name}  ")) for name in ("here", "dead"))
    assert re.split("  +", here)[1] == "this machine"
    assert re.split("  +", dead)[1] == "root@127.0.0.1:1"
    assert dead.index("connect") == here.index("ready") == head.index("state")
    assert max(map(len, lines[lines.index(head) : lines.index(dead)])) <= columns


# ---- a run, as it is on a host


@pytest.fixture
def night(folder: Path) -> Path:
    """A run of two ranks on `here`, that is over; rank 0 wrote first and last, and its bar was overwritten."""
    (folder / "inventory.toml").write_text(f'[hosts.here]\ntransport = "local"\ncache = "{folder}/here"\n')
    run = folder / "here" / "runs" / "abcdef0123456789"
    for name in ("logs", "times"):
        (run / name).mkdir(parents=True)
    (folder / "here").chmod(0o700)
    about = {"id": run.name, "name": "night", "function": "train", "hosts": ["here"], "place": 0, "ranks": [0, 1]}
    (run / "about").write_text(json.dumps({**about, "world": 2, "on": "all", "elastic": False}))
    (run / "status").write_text(json.dumps({"state": "done", "started": 1e9}))
    parts = [
        ("0.out", 1, "first\n"),
        ("1.out", 2, "\033[32msecond\033[0m\n"),
        ("0.err", 3, "0 %\r100 %\n"),
        ("0.out", 4, "last\n"),
    ]
    for name, second, line in parts:
        with (run / "logs" / name).open("a") as log, (run / "times" / name).open("a") as times:
            times.write(f"{log.tell():015d} {int((1e9 + second) * 1000):015d}\n")
            log.write(line)
    os.utime(run / "logs" / "0.out", (2e9, 2e9))
    return folder


RUNS = """\
run       state  started           ranks  GPUs  hosts  name   last line
abcdef01  done   2001-09-09 01:46      2  –     here   night  last
"""


@pytest.mark.parametrize("columns", [60, 100, None])
def test_runs_have_a_header_and_a_start(night: Path, columns: int | None) -> None:
    if columns is None:
        assert piped(night, "runs", "here", TZ="UTC").stdout == RUNS
        return
    lines = text(seen(night, columns, "runs", "here", TZ="UTC")[1]).rstrip().splitlines()
    head, _, row = lines
    left_out = {"GPUs", "ranks", "started"} if columns == 60 else set()
    rows = [re.split("  +", line) for line in RUNS.splitlines()]
    expected = [column for column in zip(*rows, strict=True) if column[0] not in left_out]
    assert [*zip(re.split("  +", head), re.split("  +", row), strict=True)] == expected


def test_logs_are_shown_as_live_output_is(night: Path) -> None:
    code, said = seen(night, 100, "logs", "night", "--timestamps", TZ="UTC")
    assert code == 0
    assert "\x1b[32msecond\x1b[0m" in said and "\x1b[31m│\x1b[0m 09-09 01:46:43.000 100 %" in said
    assert text(said).splitlines() == [
        "here[0] │ 09-09 01:46:41.000 first",
        "here[1] │ 09-09 01:46:42.000 second",
        "here[0] │ 09-09 01:46:43.000 100 %",
        "here[0] │ 09-09 01:46:44.000 last",
    ]
    plain = seen(night, 100, "logs", "night", NO_COLOR="1")[1]
    assert plain.splitlines() == ["here[0] │ first", "here[1] │ second", "here[0] │ 100 %", "here[0] │ last"]


def test_a_run_that_has_ended_is_not_stopped(night: Path) -> None:
    ran = piped(night, "stop", "night")
    assert (ran.returncode, ran.stdout) == (0, "abcdef01 night has already ended: done\n"), ran.stderr


@pytest.fixture
def agent(night: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The agent of the run, which is not over then."""
    run = night / "here" / "runs" / "abcdef0123456789"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with subprocess.Popen(["sleep", "100"], cwd=run) as agent:
        (run / "status").write_text(json.dumps({"state": "running", "started": 1e9}))
        (run / "agent").write_text(f"{agent.pid} {boot} {run}\n")
        yield agent
        agent.kill()


def test_stopping_all_runs_is_confirmed(night: Path, agent: subprocess.Popen[bytes]) -> None:
    row = r"abcdef01 +running +2001-09-09 \d\d:\d\d +2 +\S.* +here +night"
    ran = piped(night, "stop", "--all", "--hosts=here")
    assert (ran.returncode, ran.stderr) == (2, "error: prompts need a terminal\nhint: add --yes\n")
    assert re.search(row, ran.stdout)
    for answer in ("", "n"):
        with Typist([*PROGRAM, "stop", "--all", "--hosts=here"], night) as person:
            person.sees(r"stop 1 run\? \[y/N\]")
            person.types(answer)
            assert person.ends() == 1
        assert agent.poll() is None
    with Typist([*PROGRAM, "stop", "--all", "--hosts=here"], night) as person:
        person.sees(r"stop 1 run\? \[y/N\]")
        person.types("y")
        assert person.ends() == 0
        assert "abcdef01  lost  night" in person.said
    assert agent.wait(10) == -signal.SIGTERM
    ran = piped(night, "stop", "--all", "--yes", "--hosts=here")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "no runs are running\n")


def test_attach_says_what_it_follows_and_that_ctrl_c_does_not_stop_it(
    night: Path, agent: subprocess.Popen[bytes]
) -> None:
    with subprocess.Popen([*PROGRAM, "attach", "night"], cwd=night, stderr=subprocess.PIPE, text=True) as attached:
        assert attached.stderr is not None
        assert attached.stderr.readline() == "following night (abcdef01), running on here; Ctrl-C leaves it running\n"
        attached.send_signal(signal.SIGINT)
        assert attached.stderr.read().endswith("interrupted: the run was not stopped; to stop it: skyfab stop night\n")
        assert attached.wait(60) == 130
    assert agent.poll() is None


def test_piped_logs_keep_the_streams_apart(night: Path) -> None:
    ran = piped(night, "logs", "abcdef", NO_COLOR="1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        0,
        "here[0] first\nhere[1] second\nhere[0] last\n",
        "here[0] 100 %\n",
    )
    missing = piped(night, "logs", "nihgt")
    assert missing.returncode == 2 and "hint: did you mean night?" in missing.stderr


# ---- which hosts


def test_the_hosts_are_named_where_they_were_not_given(folder: Path) -> None:
    line = "using here, dead: all hosts of inventory.toml\n"
    assert piped(folder, "exec", "--", "true").stderr.startswith(line)
    assert line not in piped(folder, "stacks", "here").stderr
    assert line not in piped(folder, "stacks", "--json").stderr
    (folder / "inventory.toml").write_text(f'[hosts.here]\ntransport = "local"\ncache = "{folder}/here"\n')
    ran = piped(folder, "run", "hello.py")
    assert ran.stdout == "here[0] hello from 0\n", "the inventory counts without --hosts"
    assert ran.stderr == "using here: all hosts of inventory.toml\n"


# ---- colours


def test_no_color_takes_colours_and_nothing_else(folder: Path) -> None:
    words = ("exec", "both", "--", "printf '\\033[31mred\\033[0m\\n'")
    plain, coloured = (seen(folder, 100, *words, **more)[1] for more in ({"NO_COLOR": "1"}, {}))
    colour = re.compile(r"\x1b\[[0-9;]*m")
    assert colour.search(coloured) and not colour.search(plain)
    for said in (plain, coloured):
        assert "here │ red" in text(said)
        assert "✗ dead: failed" in text(said)
        assert re.search("[⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] dead", said), "progress is shown"


# ---- -v


def test_verbose_shows_commands_and_waits_with_seconds(folder: Path) -> None:
    ran = piped(folder, "-v", "hosts", "dead")
    assert ran.returncode == 3
    assert re.search(r"^ +\d+\.\d s  ssh -T .* -o Port=1 .*-- 127.0.0.1 ", ran.stderr, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d s  dead: waiting for the login$", ran.stderr, re.MULTILINE)
    ran = piped(folder, "hosts", "nobody", "-v")
    assert "Traceback" in ran.stderr and ran.stderr.splitlines()[-2].startswith("error: inventory.toml: no host")


# ---- output that cannot be written


def test_output_that_cannot_be_written_is_one_line_and_an_error(folder: Path) -> None:
    program = shlex.join(PROGRAM)
    for redirected, says in (
        (">&-", "error: standard output is closed\nhint: to discard what is printed, append >/dev/null\n"),
        (">/dev/full", "error: standard output: No space left on device\n"),
    ):
        for task in ("--help", "exec here -- echo hi"):
            line = f"{program} {task} {redirected}"
            ran = subprocess.run(["/bin/sh", "-c", line], cwd=folder, stderr=subprocess.PIPE, text=True)
            assert (ran.returncode, ran.stderr) == (1, says), task


def test_a_run_goes_on_when_its_output_cannot_be_written(folder: Path) -> None:
    (folder / "job.py").write_text("print('lost')\nopen('done', 'w').close()\n")
    line = f"PYTHONUNBUFFERED=1 {shlex.join(PROGRAM)} run --hosts=local job.py >/dev/full"
    ran = subprocess.run(["/bin/sh", "-c", line], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=170)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, "error: standard output: No space left on device")
    assert ran.stderr.count("No space") == 1 and (folder / "done").exists()


@pytest.mark.parametrize(
    "task",
    [
        "run --hosts=local {0}/job.py",
        "serve night -- true",
        "get x",
    ],
)
def test_what_needs_a_current_folder_says_that_it_was_removed(folder: Path, task: str) -> None:
    """What is written to the folders of such a run could not be found again."""
    (folder / "job.py").touch()
    line = f"mkdir gone; cd gone; rmdir ../gone; exec {shlex.join(PROGRAM)} {task.format(folder)}"
    environ = {**os.environ, "SKYFAB_INVENTORY": str(folder / "inventory.toml")}
    ran = subprocess.run(["/bin/sh", "-c", line], cwd=folder, capture_output=True, text=True, env=environ, timeout=170)
    assert ran.stderr.startswith("error: the current folder has been removed\nhint: "), ran.stderr
    assert ran.returncode == 2


def test_a_run_whose_output_is_not_read_is_stopped_and_its_files_are_fetched(folder: Path) -> None:
    """`| head`, as with a program that runs here."""
    (folder / "endless.py").write_text(
        'import pathlib, time\npathlib.Path("made.txt").write_text("kept")\n'
        'while True:\n    print("line", flush=True)\n    time.sleep(0.1)\n'
    )
    line = f"{{ {shlex.join(PROGRAM)} run --hosts=here --get=made.txt endless.py; echo $? >code; }} | head -1"
    ran = subprocess.run(["/bin/sh", "-c", line], cwd=folder, capture_output=True, text=True, timeout=170)
    assert ran.stdout == "here[0] line\n"
    assert "the output is no longer read: stopping, then fetching files" in ran.stderr
    assert (folder / "code").read_text() == "1\n"
    assert (folder / "made.txt").read_text() == "kept"


# ---- completion


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`skyfab` is a command."""
    program = tmp_path / "bin" / "skyfab"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("on_path")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("skyfab hos", ["hosts"]),
        ("skyfab logs --t", ["--tail", "--timestamps"]),
        ("skyfab run --hosts h", ["here"]),
        ("skyfab run hel", ["hello.py"]),
    ],
)
def test_shells_complete(folder: Path, line: str, words: list[str]) -> None:
    bash = f"""
        eval "$(skyfab completion bash)"
        COMP_WORDS=({line})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _shtab_skyfab
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    fish = f"skyfab completion fish | source; complete -C {shlex.quote(line)} | string split -f1 \\t"
    for argv in (["bash", "--norc", "-c", bash], ["fish", "--no-config", "-c", fish]):
        if shutil.which(argv[0]):
            ran = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=170)
            assert ran.stdout.split() == words, (argv[0], ran.stderr)


# ---- Ctrl-C


@pytest.mark.parametrize("words", [["run", "hello.py"], ["doctor"]], ids=lambda words: words[0])
def test_ctrl_c_while_hosts_connect_is_no_failure_of_theirs(folder: Path, words: list[str]) -> None:
    """One host is ready, the other accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        text = INVENTORY.format(cache=folder).replace("port = 1", f"port = {silent.getsockname()[1]}")
        (folder / "inventory.toml").write_text(text)
        task, *rest = words
        with Typist([*PROGRAM, task, "--hosts=both", *rest], folder) as person:
            silent.settimeout(60)
            with silent.accept()[0]:
                person.sees("dead")
                person.presses(b"\x03")
                assert person.ends() == 130
        assert "failed" not in person.said
        assert "Traceback" not in person.said


def test_what_a_failed_run_has_not_written_is_a_note_before_its_cause(folder: Path) -> None:
    (folder / "job.py").write_text("raise ValueError('mine')\n")
    ran = piped(folder, "run", "--hosts=here", "--ranks=1", "--workdir=temp", "--get=ckpt/*", "job.py")
    assert ran.returncode == 1
    first, *_, last = ran.stderr.splitlines()
    assert first == "not fetched: here: no file matches ckpt/*"
    assert last == "here[0] ValueError: mine"


def test_ctrl_c_while_a_command_imports_its_modules_is_no_traceback() -> None:
    """Python 3.11 raises a RuntimeError for one that comes in `__set_name__`."""
    program = """if True:
        from skyfab.cli.command import command
        from skyfab.cli.tasks import main
        class Field:
            def __set_name__(self, owner, name):
                raise KeyboardInterrupt
        @command
        def slow() -> None:
            '''Imports a module.'''
            type("Reader", (), {"hosts": Field()})
        main(["skyfab", "slow"], commands={"slow": slow})
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted\n")


ASKED = r"interrupted: \[s\]top, \[d\]etach and leave it running, or \[c\]ontinue, then Enter:"


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A command whose rank runs until there is a file `go`."""
    (tmp_path / "job.py").write_text(
        "import pathlib, time\nwhile not pathlib.Path('go').exists():\n    time.sleep(0.05)\nprint('over')\n"
    )
    return [*PROGRAM, "run", "--hosts=local", "--ranks=1", "job.py"]


@pytest.mark.parametrize("answer", ["s", "\x03"], ids=["s", "ctrl-c"])
def test_ctrl_c_asks_and_stops(tmp_path: Path, job: list[str], answer: str) -> None:
    with Typist(job, tmp_path) as person:
        person.sees(r"job\.py · 1 rank · 0:0")
        person.presses(b"\x03")
        person.sees(ASKED)
        person.presses(answer.encode() + (b"\n" if answer.isalpha() else b""))
        assert person.ends() == 130
        assert "interrupted: stopped on local" in person.said


def test_ctrl_c_asks_until_it_is_answered_and_the_job_continues(tmp_path: Path, job: list[str]) -> None:
    with Typist(job, tmp_path) as person:
        for answer in ("c", "continue"):
            person.sees(r"job\.py · 1 rank · 0:0")
            person.presses(b"\x03")
            for wrong in ("", "x"):
                person.sees(ASKED)
                person.types(wrong)
            person.sees(ASKED)
            person.types(answer)
        (tmp_path / "go").touch()
        assert person.ends() == 0
        assert "over" in person.said


def test_a_job_that_ends_meanwhile_needs_no_answer(tmp_path: Path, job: list[str]) -> None:
    with Typist(job, tmp_path) as person:
        person.sees(r"job\.py · 1 rank · 0:0")
        person.presses(b"\x03")
        person.sees(ASKED)
        (tmp_path / "go").touch()
        assert person.ends() == 0
        assert "over" in person.said


# ---- hints


def hinted(said: str) -> list[str]:
    """The commands in the hints of a message."""
    lines = [line.partition("hint: ")[2] for line in said.splitlines() if "hint: " in line]
    return [match[0] for match in (re.search(r"skyfab [a-z-].*$", line) for line in lines) if match]


@pytest.mark.lab
@pytest.mark.slow
def test_hints_work_when_they_are_typed(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in the place of the command that gave it, which had an --inventory."""
    (tmp_path / "hello.py").write_text("import sys\nprint('hello', *sys.argv[1:])\n")
    config = tmp_path / "ssh_config"
    config.write_text(f"Host *\n  UserKnownHostsFile {tmp_path}/known_hosts\n  GlobalKnownHostsFile none\n")
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(config))
    inventory = tmp_path / "my hosts.toml"
    inventory.write_text(re.sub(r"host_key = .*\n", "", lab.inventory.read_text()))
    given = f"--inventory={inventory}"
    mistakes = [
        ["exec", given, "--", "true"],  # their keys are unknown
        ["hosts", given, "--host=node1"],
        ["hosts", given, "--hosts"],
        ["run", given, "nothing.py"],
        ["logs", given, "nobody"],
        ["stop", given],
        ["trust", given, "--yess", "node2"],
    ]
    for words in mistakes:
        ran = piped(tmp_path, *words)
        assert ran.returncode in (2, 3), (words, ran)
        commands = hinted(ran.stderr)
        assert commands, (words, ran.stderr)
        for line in commands:
            typed = shlex.split(line)[1:]
            done = piped(tmp_path, *typed, *(["--yes"] if typed[0] == "trust" and "--yes" not in typed else []))
            assert done.returncode == 0, (words, line, done)
            assert given not in words or "--help" in typed or given in typed, (words, line)
