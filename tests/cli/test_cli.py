"""The command line: its tasks, what they print where, their errors without tracebacks, and their exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from stage.index import Index
from stage.program import Ran, Skyfab
from stage.spot import until

from skyfab.calls.call import as_function
from skyfab.calls.image import Image, PipIndex
from skyfab.cli import prepare, report
from skyfab.cli.parser import CommandParser
from skyfab.cli.run_options import ImageOptions
from skyfab.cli.tasks import COMMANDS
from skyfab.errors import (
    BroadcastError,
    HostLost,
    PoolError,
    RemoteTraceback,
    SkyfabError,
    Unreachable,
    UsageError,
    WorkerDied,
)
from skyfab.inventory.host import Host
from skyfab.lab import Lab
from skyfab.pool.compute import Compute

pytestmark = pytest.mark.programs

PROGRAM = [sys.executable, "-m", "skyfab"]
HERE = "using this machine (no inventory, no --hosts)\n"
NOBODY = "root@127.0.0.1:1"
"""An address where nothing listens."""
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def program(*words: str, cwd: Path, **environ: str) -> Ran:
    """The program in a process of its own."""
    done = subprocess.run(
        [*PROGRAM, *words], cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=170
    )
    return Ran(done.returncode, done.stdout, done.stderr)


# ---- usage


def test_without_a_task_it_lists_them(skyfab: Skyfab) -> None:
    code, out, _ = skyfab()
    assert code == 0
    assert {"train", "hosts", "exec", "trust", "prepare", "gc", "lab.up", "lab.down", "lab.status"} <= set(out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_task_teaches(skyfab: Skyfab, name: str) -> None:
    """An example in each task's help, and a word on each of its options; the same where the task needs a word."""
    code, out, err = skyfab(name, "--help")
    assert (code, err) == (0, "")
    assert re.match(rf"usage: skyfab {re.escape(name)}\b", out)
    assert re.search(rf"^examples:\n(  .*\n)*  .*skyfab {re.escape(name)}\b", out, re.MULTILINE)
    for action in CommandParser(COMMANDS[name]).actions:
        shown = ", ".join(action.option_strings) or str(action.metavar)
        assert re.search(rf"^  {re.escape(shown)}(?!\w).*\s+\w", out, re.MULTILINE), action
    assert skyfab("--help", name).out == skyfab("help", name).out == skyfab(name, "-h").out == out


def test_help_loads_no_more_than_it_needs(tmp_path: Path) -> None:
    """Help does not wait for connections, environments or drawing to be imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "skyfab", "--list"], cwd=tmp_path, capture_output=True, text=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    ours = {
        name for name in loaded if name.startswith("skyfab.") and not name.startswith(("skyfab.cli", "skyfab._util"))
    }
    assert ours == {"skyfab.errors", "skyfab.ui", "skyfab.ui.terminal"}
    assert not loaded & {"skyfab.pool.each_host", "skyfab.cli.host_keys"}
    assert not loaded & {"fabric", "invoke", "rich", "shtab"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nope"], "error: unknown command 'nope'\nhint: skyfab --help\n"),
        (["help", "trian"], "hint: did you mean: skyfab train --help\n"),
        (["trian", "--epochs=3"], "hint: did you mean: skyfab train --epochs=3\n"),
        (["train.py", "--ranks=2", "-x"], "hint: did you mean: skyfab run train.py --ranks=2 -x\n"),
        (["train", "--epoch=3"], "error: unknown option --epoch\nhint: did you mean: skyfab train --epochs=3\n"),
        (["exec", "--hsots=x", "--", "true"], "hint: did you mean: skyfab exec --hosts=x -- true\n"),
        (["get", "--to=x"], "error: expected a path, or --run\nhint: skyfab get --help\n"),
        (["stop"], "error: expected the ID or name of a run, or --all\nhint: to list runs: skyfab runs\n"),
        (["run", "--sync=some", "x.py"], "error: invalid value 'some': expected --sync or --sync=all\n"),
        (["logs", "night", "--since=10"], "error: invalid --since=10: expected a number with s, m, h or d"),
        (["train", "--hosts"], "error: --hosts: expected one argument\nhint: skyfab train --help\n"),
        (["run"], "error: the following arguments are required: FILE.py[:function]\nhint: skyfab run --help\n"),
        (["run", "no.py"], "error: no such file: no.py\n"),
        (
            ["run", "--hosts=node1", "--inventory=a.toml", "nosuch-smi", "-L"],
            "hint: to run a program: skyfab run --inventory=a.toml --hosts=node1 -- nosuch-smi -L\n",
        ),
        (["run", "python3", "x.py"], "no such file: python3\nhint: to run a program: skyfab run -- python3 x.py\n"),
        (
            ["serve", "web", "--ranks=1", "python3", "-m", "http.server"],
            "error: unexpected argument 'python3'\nhint: put the program after --: skyfab serve ",
        ),
        (["run", "node1", "x.py", "-a"], "hint: to name hosts: skyfab run --hosts=node1 x.py -a\n"),
        (["run", "--epochs=3", "x.py"], "hint: options of the program follow it: skyfab run x.py --epochs=3\n"),
        (
            ["exec", "local", "ls", "-la"],
            "error: unknown option -la\nhint: options of the program follow after --: skyfab exec --help\n",
        ),
        (["train", "--epochs=ten"], "error: --epochs must be 1 or more, not 'ten'\n"),
        (["train", "--ranks=0"], "error: --ranks must be 1 or more, not '0'\n"),
        (
            ["logs", "no-such-run"],
            "error: no run 'no-such-run' on this machine (no inventory loaded)\nhint: set SKYFAB_",
        ),
        (
            ["completion", "tcsh"],
            "error: unknown shell 'tcsh': choose from bash, zsh, fish\nhint: skyfab completion bash",
        ),
        (["exec", "--"], "error: no command to run\nhint: put it after --: skyfab exec -- uptime\n"),
        (["exec", "hostname"], "hint: put it after --: skyfab exec -- hostname\n"),
        (["put", "a", "b"], "error: unexpected argument 'b'\nhint: put copies one path: repeat the command for b\n"),
        (["--hosts=a", "run", "s.py"], "hint: options follow the command: skyfab run --hosts=a s.py\n"),
        (
            ["sweep", "trial.py", "--lr=0.1"],
            "hint: options of the program follow after --: skyfab sweep trial.py -- --lr=0.1\n",
        ),
        (["exec", "node1", "echo", "hello"], "hint: put it after --: skyfab exec node1 -- echo hello\n"),
        (["hosts", "--inventory=missing.toml"], "error: missing.toml: No such file"),
        (["trust"], "error: only this machine is selected, and it has no host key"),
        (["prepare", "--install=no"], 'error: invalid install=\'no\'\nhint: expected "auto", "push" or "fetch"'),
        (["prepare", "--index=https://mirror.example"], "error: invalid --index=https://mirror.example\nhint: "),
        (["prepare", "--requirements=missing.txt"], "error: cannot read missing.txt: No such file"),
        (["prepare", "--lock=pylock.toml"], "error: --lock needs packages"),
        (["prepare", "--pip=app @"], "error: not a valid requirement: 'app @'"),
        (["run", "--hosts", "node1", "node2", "x.py"], "skyfab run --hosts=node1,node2 x.py"),
        (["run", "--mirror=ckpt", "--limit=fast", __file__], "limit"),
    ],
)
def test_a_slip_of_the_finger_is_one_message_and_2(
    skyfab: Skyfab, words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without the inventory of the last run
    code, out, err = skyfab(*words)
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err


def test_plain_invoke_runs_the_same_tasks_with_the_same_codes(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("from skyfab.cli import namespace\n")

    def invoke(*words: str) -> Ran:
        done = subprocess.run([sys.executable, "-m", "invoke", *words], cwd=tmp_path, capture_output=True, text=True)
        return Ran(done.returncode, done.stdout, done.stderr)

    code, out, err = invoke("hosts", "--inventory=no")
    assert (code, out) == (2, "") and err.startswith("error: no: No such file")
    (tmp_path / "here.py").write_text("print('ran')\n")
    assert invoke("run", "here.py", "--hosts=local", "--sync=all") == (0, "local[0] ran\n", "")
    assert invoke("run", "here.py", "--sync=some") == (2, "", "error: --sync must be all, not 'some'\n")


# ---- hosts


HEAD = ["host", "address", "system", "python", "CPUs", "load", "memory", "disk", "GPUs", "state"]
FACTS = ["name", "address", "reachable", "python", "platform", "cpus", "gpus", "slots", "survey", "error", "hint"]


def test_hosts_as_json_has_the_one_that_failed_too(skyfab: Skyfab) -> None:
    code, out, err = skyfab("hosts", f"--hosts=local,{NOBODY}", "--json")
    here, nobody = json.loads(out)
    assert (code, err) == (3, "")
    assert list(here) == list(nobody) == FACTS
    assert here["reachable"] and here["cpus"] >= 1 and here["error"] is None
    assert here["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert not nobody["reachable"] and "refused" in nobody["error"] and nobody["hint"]


def test_a_host_that_failed_has_its_reason_in_the_table_and_its_hint_below(skyfab: Skyfab) -> None:
    code, out, err = skyfab("hosts", "local", NOBODY)
    head, here, nobody = out.splitlines()
    assert code == 3 and "\x1b" not in out
    assert re.split("  +", head) == HEAD
    assert here.startswith("local             this machine  ") and here.endswith("ready")
    assert nobody.startswith(f"{NOBODY}  {NOBODY}  –") and "refused" in nobody
    assert err.startswith(f"hint: {NOBODY}: ")


# ---- exec


def test_exec_runs_a_shell_line_here_and_keeps_the_streams_apart(skyfab: Skyfab, tmp_path: Path) -> None:
    code, out, err = skyfab("exec", "--", "pwd; echo two words | tr a-z A-Z;", "echo oops >&2")
    assert (code, err) == (0, f"{HERE}local oops\n")
    assert out == f"local {tmp_path}\nlocal TWO WORDS\n"


@pytest.mark.parametrize(("command", "how"), [("exit 7", "exit code 7"), ("kill -9 $$", "killed by signal 9")])
def test_exec_says_who_failed_and_how(skyfab: Skyfab, command: str, how: str) -> None:
    assert skyfab("exec", "--hosts=local", "--", command) == (1, "", f"local: {how}\n")


def test_exec_goes_on_where_it_can(skyfab: Skyfab) -> None:
    code, out, err = skyfab("exec", f"--hosts={NOBODY},local", "--", "echo", "here")
    assert (code, out) == (3, "local here\n")
    assert f"error: {NOBODY}: " in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("number", "code", "said", "before"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted\n", "", id="ctrl-c"),
        pytest.param(signal.SIGTERM, 143, "terminated\n", "trap '' INT;", id="sigterm-in-the-background"),
    ],
)
def test_a_signal_ends_the_command_and_says_so_in_a_line(
    tmp_path: Path, number: int, code: int, said: str, before: str
) -> None:
    """In the background of a shell script SIGINT is ignored, which must not hold for SIGTERM."""
    inner = shlex.join([*PROGRAM, "exec", "--hosts=local", "--", "echo $$; exec sleep 100"])
    words = ["/bin/sh", "-c", f"{before} exec {inner}"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        sleeper = int(running.stdout.readline().split()[1])
        running.send_signal(number)
        assert running.wait(30) == code
        assert running.stderr.read() == said
    until(lambda: not Path(f"/proc/{sleeper}").exists(), "the end of the command", 10)


def test_a_program_of_its_own_keeps_its_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Compute("local", ui="none"):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("task", [["exec", "local", "--", "seq 20000"], ["--list"]])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, task: list[str]) -> None:
    source, sink = os.pipe()
    os.close(source)
    done = subprocess.run([*PROGRAM, *task], cwd=tmp_path, stdout=sink, stderr=subprocess.PIPE, text=True)
    os.close(sink)
    assert done.stderr == ""
    assert done.returncode in (0, 1)


# ---- prepare


def test_the_options_of_prepare_are_an_image(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# what we need\n\nnumpy >=1 # and no less\ntorch \\\n  ==2.6\n")
    indexes = ["https://i.example/s?x=1=a,b", "http://j/=c"]
    options = ImageOptions(
        pip=["a,b", "c"], index=indexes, requirements=str(file), apt=["git, curl", "jq"], install="push", python="3.11"
    )
    image = options.image()
    assert image.python == "3.11"
    assert image.pip == ("a", "b", "c", "numpy >=1", "torch ==2.6") and image.apt == ("git", "curl", "jq")
    assert image.pip_indexes == (PipIndex("https://i.example/s?x=1", ("a", "b")), PipIndex("http://j/", ("c",)))
    assert image.install == "push"
    file.write_text("numpy\n-i https://i.example\n")
    with pytest.raises(UsageError, match=r"not '-i https://i.example'"):
        ImageOptions(requirements=str(file)).image()


def test_prepare_installs_what_the_plugins_of_the_project_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plugins = '[tool.skyfab]\nplugins = ["huggingface"]\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "app"\ndependencies = ["shelf"]\n{plugins}')
    hosts = [Host(name="node1"), Host(name="node2")]
    assert prepare._image(ImageOptions(), hosts).pip == ("shelf", "transformers", "datasets", "tokenizers")
    assert prepare._image(ImageOptions(pip=["shelf"]), hosts).pip == ("shelf",), "as in a program, not as skyfab run"


@pytest.mark.lab
@pytest.mark.slow
def test_prepare_builds_what_a_program_finds(skyfab: Skyfab, lab: Lab, tmp_path: Path) -> None:
    def prefix() -> str:  # travels by value: hosts have no pytest
        import sys

        return sys.prefix

    with Index(tmp_path / "wheels") as index:
        index.add("sky-one", "1.0", requires=["sky-two"])
        index.add("sky-two", "2.0")
        wanted = ("--pip=sky-one<2,>=1", f"--index={index.url}=sky-one,sky-two", f"--inventory={lab.inventory}")
        code, out, err = skyfab("prepare", "--hosts=node1,node2", *wanted, "--lock=pylock.toml")
        assert code == 0, err
        head, *rows, wrote = out.splitlines()
        assert head.split() == ["host", "environment", "packages", "seconds", "state"]
        assert [row.split()[::2] for row in rows] == [["node1", "2", "ready"], ["node2", "2", "ready"]]
        assert wrote == "pylock.toml: 2 packages; use it with Image(lock='pylock.toml')"
        digest = rows[0].split()[1]
        for image in (
            Image(pip=("sky-one<2,>=1",), pip_indexes=(PipIndex(index.url, ("sky-one", "sky-two")),)),
            Image(lock=str(tmp_path / "pylock.toml")),
        ):
            with Compute("node1", inventory=lab.inventory, image=image, ui="none") as pool:
                assert Path(pool.run(as_function(prefix)())).name.startswith(digest)

        index.add("sky-one", "1.5", requires=["sky-two"])
        again = skyfab("prepare", "--hosts=node1,node2", *wanted).out
        assert again.split().count(digest) == 2
        newer = skyfab("prepare", f"--hosts=node1,{NOBODY}", *wanted, "--upgrade")
        assert newer.code == 3 and "refused" in newer.out.splitlines()[2] and f"error: {NOBODY}: " in newer.err
        assert newer.out.splitlines()[1].split()[1] != digest, "the one that is there was prepared all the same"
        code, out, err = skyfab("prepare", "--hosts=node1", "--pip=sky-none", *wanted)
        assert code == 2 and "error: " in err and "sky-none" in err and "Traceback" not in err
        assert "no version of" in out, "the one host has its reason in the table"


# ---- gc


def test_gc_says_what_it_did_for_each_host(skyfab: Skyfab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = f'[hosts.here1]\ntransport = "local"\ncache = "{tmp_path}/cache"\n'
    (tmp_path / "inventory.toml").write_text(f'{here}[hosts.dead]\naddress = "127.0.0.1"\nport = 1\n')
    assert skyfab("gc", "--hosts=here1") == (0, "here1: nothing to remove\n", "")
    code, out, err = skyfab("gc", "--hosts=here1,dead", "--days=0")
    assert (code, out) == (3, "here1: nothing to remove\n")
    assert err.startswith("error: dead: ") and "Traceback" not in err
    assert skyfab("gc", "--here") == (0, "this machine: nothing to remove\n", "")
    assert skyfab("gc", "--here", "--hosts=here1").out == "this machine: nothing to remove\nhere1: nothing to remove\n"


# ---- errors as they read


def raised(error: Exception, host: str = "node1", rank: int | None = 0) -> Exception:
    error.__cause__ = RemoteTraceback(f"Traceback on {host}\n{type(error).__name__}: {error}\n", host, rank)
    return error


def test_an_exception_of_the_users_shows_the_hosts_traceback() -> None:
    error = raised(ValueError("boom"))
    lines = ["on node1[0]:", "Traceback on node1", "ValueError: boom", "error: node1[0] ValueError: boom"]
    assert report.text(error).splitlines() == lines
    assert report.exit_code(error) == 1 and report.is_expected(error)


def test_a_broadcast_has_the_hint_and_code_of_its_first_failure() -> None:
    lost = HostLost("no word", host="node2", hint="is it up?")
    error = BroadcastError("f failed on 2 of 2 ranks", [lost, WorkerDied("f: cancelled", host="node1", rank=0)])
    assert report.exit_code(error) == 3
    lines = report.text(error).splitlines()
    assert lines[1:] == ["node1[0]: f: cancelled", "node2: no word", "hint: is it up?"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (Unreachable("x", host="a"), 3),
        (PoolError("2 of 2 hosts failed", [Unreachable("x", host="a"), Unreachable("y", host="b")]), 3),
        (WorkerDied("x"), 1),
    ],
)
def test_exit_codes(error: SkyfabError, code: int) -> None:
    assert report.exit_code(error) == code
    assert report.text(error) == f"error: {error}"


# ---- train


def test_train_without_torch_says_how_to_get_it(skyfab: Skyfab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "skyfab.demo.digits", raising=False)
    monkeypatch.delattr("skyfab.demo.digits", raising=False)
    code, out, err = skyfab("train")
    assert (code, out) == (2, "")
    assert "error: training needs torch" in err and "./inv train" in err and "skyfab[torch]" in err


def trained(ran: Ran, hosts: list[str]) -> None:
    assert ran.code == 0, ran.err
    assert f"training on {len(hosts)} ranks of {len(set(hosts))} host" in ran.out
    assert f"{hosts[0]}[0] epoch 3/3" in ran.out
    assert f"{hosts[1]}[1] epoch" not in ran.out, "they train one model: the first speaks for all"
    assert re.search(r"^loss     [▁▂▃▄▅▆▇█]{3} 0\.\d+$", ran.out, re.MULTILINE)
    assert re.search(r"^accuracy [▁▂▃▄▅▆▇█]{3} \d+\.\d %$", ran.out, re.MULTILINE)
    figures = re.search(r"^evaluated locally: (\S+) % before, (\S+) % after$", ran.out, re.MULTILINE)
    assert figures is not None
    assert float(figures[1]) < 30 and float(figures[2]) > 85
    assert re.fullmatch(r"connect \S+ s, train \S+ s, \S+ s total", ran.out.splitlines()[-1])


@pytest.mark.lab
@pytest.mark.torch
@needs_torch
@pytest.mark.slow
def test_train_on_hosts(lent_lab: Lab, tmp_path: Path) -> None:
    words = ("train", "--hosts=node1,node2", f"--inventory={lent_lab.inventory}", "--epochs=3")
    trained(program(*words, cwd=tmp_path), ["node1", "node2"])


# ---- with hosts


def test_an_address_of_many_aliases_is_asked_for_its_key_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, skyfab: Skyfab
) -> None:
    """An sshd drops connections when many begin at once."""
    fake = tmp_path / "ssh-keyscan"
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIPUnK2Ray/BWDM/iFcd8qYpFn0ZZwGRpokCBZRVDGLkJ"
    fake.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\necho 192.0.2.7 ssh-ed25519 {key}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "config").write_text("Host a b c\n  HostName 192.0.2.7\n")
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(tmp_path / "config"))
    code, out, _ = skyfab("trust", "--hosts=a,b,c", f"--known-hosts={tmp_path}/known", "--yes")
    assert code == 0, out
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.lab
def test_an_unknown_host_key_is_refused_until_it_is_trusted(
    skyfab: Skyfab, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = tmp_path / "known hosts" / "file"
    config = tmp_path / "ssh_config"
    config.write_text(f'Host *\n  UserKnownHostsFile "{known}"\n  GlobalKnownHostsFile none\n')
    monkeypatch.setenv("SKYFAB_SSH_CONFIG", str(config))
    inventory = tmp_path / "inventory.toml"
    inventory.write_text(re.sub(r"host_key = .*\n", "", lab.inventory.read_text()))

    code, out, err = skyfab("hosts", "--hosts=node1")
    assert code == 3 and "host key is unknown" in out and "hint: node1: skyfab trust --hosts=node1" in err

    code, out, err = skyfab("trust", "--hosts=node1")
    assert code == 2 and "prompts need a terminal" in err and not known.exists()
    assert re.search(r"  256 SHA256:[\w+/]{43} node1 \(ED25519\)\n", out)

    assert skyfab("trust", "--hosts=node1", "--yes").code == 0
    assert stat.S_IMODE(known.stat().st_mode) == 0o600
    assert skyfab("hosts", "--hosts=node1").code == 0
    before = known.read_text()
    assert "already recorded" in skyfab("trust", "--hosts=node1").out
    assert known.read_text() == before


@pytest.mark.lab
def test_a_changed_host_key_needs_replace(skyfab: Skyfab, lab: Lab, tmp_path: Path) -> None:
    one, two = lab.hosts[:2]
    place = one.address if one.port == 22 else f"[{one.address}]:{one.port}"
    known = tmp_path / "known_hosts"
    known.write_text(f"other.example ssh-ed25519 AAAA\n{place} {two.host_key}")
    (tmp_path / "inventory.toml").write_text(re.sub(r"host_key = .*\n", "", lab.inventory.read_text()))
    trust = ("trust", "--hosts=node1", f"--known-hosts={known}", "--yes")

    code, _, err = skyfab(*trust)
    assert code == 3 and "--replace" in err and two.host_key in known.read_text()

    assert skyfab(*trust, "--replace").code == 0
    assert known.read_text() == f"other.example ssh-ed25519 AAAA\n{place} {' '.join(one.host_key.split()[:2])}\n"


@pytest.mark.lab
def test_trust_replaces_nothing_that_is_no_file(skyfab: Skyfab, namespaces: Lab, tmp_path: Path) -> None:
    """``UserKnownHostsFile /dev/null`` is what `vagrant ssh-config` prints."""
    (tmp_path / "inventory.toml").write_text(re.sub(r"host_key = .*\n", "", namespaces.inventory.read_text()))
    device = tmp_path / "null"
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(0, 0))  # also allowed in a user namespace
    code, out, err = skyfab("trust", "--hosts=node1", f"--known-hosts={device}", "--yes")
    assert code == 2
    assert "recorded" not in out
    assert "not a regular file" in err
    assert "--known-hosts=" in err
    assert device.is_char_device()


@pytest.mark.lab
def test_lab_up_prints_an_inventory_that_works(tmp_path: Path) -> None:
    """The path is the last line of stdout; everything else goes to stderr."""
    place = {"SKYFAB_LAB": str(tmp_path / "lab")}
    try:
        code, out, err = program("lab.up", "--count=1", cwd=tmp_path, **place)
        assert code == 0, err
        [path] = out.splitlines()
        assert "node1" in err and "hint" not in err, "the path goes to a variable"
        assert program("hosts", cwd=tmp_path, SKYFAB_INVENTORY=path).code == 0
        status = program("lab.status", cwd=tmp_path, SKYFAB_INVENTORY="", **place)
        assert status.out.startswith("node1 ") and status.err == f"hint: export SKYFAB_INVENTORY={path}\n"
        assert program("lab.status", cwd=tmp_path, SKYFAB_INVENTORY=path, **place).err == ""
    finally:
        down = program("lab.down", cwd=tmp_path, **place)
    assert down.code == 0
    assert down.err.splitlines()[-1] == "the lab is down"
    assert program("lab.down", cwd=tmp_path, **place).err == "no lab was up\n"
    assert not Path(path).exists()
    assert program("lab.status", cwd=tmp_path, **place).out == ""
