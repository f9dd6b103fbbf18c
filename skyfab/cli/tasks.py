"""The tasks and options of the `skyfab` command, as an invoke collection that users can add to their own tasks.py.

``skyfab TASK``, ``invoke TASK`` and ``./inv TASK`` run the same tasks; each is implemented in a module of `skyfab.cli`.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from invoke import Argument, Collection, Context, Exit, ParseError, Program, Task, task

from skyfab import __version__
from skyfab.cli import report
from skyfab.cli.sigterm import SIGTERM
from skyfab.errors import UsageError

SELECT = {
    "hosts": "names, groups or tags of the inventory, node[1-4], !node3, user@10.0.0.5:2222; several with commas",
    "inventory": "an inventory file; else $SKYFAB_INVENTORY, ./inventory.toml, the user's own",
}

RUN = "the run: its id, the beginning of that, or its name"


class _Task(Task[Callable[..., None]]):
    """A task with the few usual short flags: -f for --follow."""

    def get_arguments(self, ignore_unknown_help: bool | None = None) -> list[Argument]:
        found: list[Argument] = super().get_arguments(ignore_unknown_help)
        for argument in found:
            if argument.name == "follow":
                argument.names = (*argument.names, "f")
        return found


def command(*repeated: str, **help_: str) -> Callable[[Callable[..., int | None]], Task[Callable[..., None]]]:
    """Makes a task that reports failures as a message and an exit code, whichever program runs it.

    `repeated` options may be given several times, and are passed as a list.
    """

    def decorate(body: Callable[..., int | None]) -> Task[Callable[..., None]]:
        @functools.wraps(body)
        def run(context: Context, **options: Any) -> None:
            code = _reported(functools.partial(body, context, **options))
            if code:
                raise Exit(code=code)

        # No automatic short flags: -h is help, not hosts.
        name = body.__name__.strip("_")
        make = task(help=help_, iterable=list(repeated), auto_shortflags=False, name=name, klass=_Task)
        made: Task[Callable[..., None]] = make(run)
        return made

    return decorate


def _reported(body: Callable[[], int | None]) -> int | None:
    try:
        code = body()
        sys.stdout.flush()
        return SIGTERM.code if code == 130 and SIGTERM.came else code
    except KeyboardInterrupt:
        text, code = ("terminated", SIGTERM.code) if SIGTERM.came else ("interrupted", 130)
        raise Exit(f"\n{text}" if sys.stderr.isatty() else text, code=code) from None
    except BrokenPipeError:  # a closed pipe (`| head`): avoid another error when stdout is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Exit(code=1) from None
    except Exception as error:
        if not report.is_expected(error):
            raise
        if os.environ.get("SKYFAB_DEBUG"):
            traceback.print_exc()
        raise Exit(report.text(error), code=report.exit_code(error)) from error


@command(
    **SELECT,
    epochs="how often each rank sees its share of the data; 10",
    ranks="ranks on each host",
    detach="leave it to the hosts, and end; pressing d does so later",
)
def train(
    _: Context,
    hosts: str | None = None,
    inventory: str | None = None,
    epochs: str = "10",
    ranks: str | None = None,
    detach: bool = False,
) -> None:
    """Train a digit classifier, on hosts or here.

    The model is built here, goes out untrained, is trained by all ranks together (DDP), each on its share of the data,
    comes back and is evaluated here. Without hosts: two ranks on this machine.

        skyfab train
        skyfab train --hosts=node1,node2 --epochs=20
        skyfab train --hosts=gpu --inventory=lab.toml --ranks=2
        skyfab train --hosts=gpu --epochs=500 --detach
    """
    from skyfab.cli.train import train as run

    count = None if ranks is None else _count("ranks", ranks)
    run(hosts, inventory, epochs=_count("epochs", epochs), ranks=count, detach=detach)


@command(
    **SELECT,
    ranks="ranks on each host; one per GPU, or one",
    target="FILE.py, or FILE.py:function",
    workdir="where relative paths lead: a folder on the hosts, temp, or auto",
    detach="leave it to the hosts, and end; pressing d does so later",
)
def run(
    _: Context,
    target: str,
    hosts: str | None = None,
    inventory: str | None = None,
    ranks: str | None = None,
    workdir: str = "auto",
    detach: bool = False,
) -> None:
    """Run a script on every rank, as torchrun would.

    run [--hosts=…] FILE.py[:function] -- ARGUMENTS: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the like are set, so
    a script written for torchrun needs no change. The modules beside the script travel with it; data does not.
    Files that it writes stay: on a host in a folder that stands for this one, and at the end you are told how to fetch
    them. --workdir=temp for a folder that goes. Without hosts: two ranks on this machine, in this folder. Ends with 1
    when it failed anywhere.

        skyfab run --hosts=node1,node2 train.py -- --epochs 3
        skyfab run --hosts=gpu --ranks=2 experiment.py:main
    """
    from skyfab.cli.run import run as start

    count = None if ranks is None else _count("ranks", ranks)
    start(target, _after_dashes(), hosts, inventory, ranks=count, workdir=workdir, detach=detach)


@command(**SELECT)
def runs(_: Context, hosts: str | None = None, inventory: str | None = None) -> int:
    """List detached runs, the latest first.

    For each its id, state, age, ranks and hosts, name and last line. Ends with 3 when a host cannot be asked.

        skyfab runs
        skyfab runs --hosts=gpu
    """
    from skyfab.cli.runs import runs as show

    return show(hosts, inventory)


@command(**SELECT, id=RUN, follow="until it is over", rank="only what this one has written")
def logs(
    _: Context,
    id: str,  # noqa: A002
    hosts: str | None = None,
    inventory: str | None = None,
    follow: bool = False,
    rank: str | None = None,
) -> None:
    """Print what a detached run has written.

    Each line with its host and rank; what went to stderr goes there.

        skyfab logs 3f2a91c0
        skyfab logs night -f --rank=0
    """
    from skyfab.cli.runs import logs as show

    show(id, hosts, inventory, follow=follow, rank=None if rank is None else _count("rank", rank, least=0))


@command(**SELECT, id=RUN)
def attach(_: Context, id: str, hosts: str | None = None, inventory: str | None = None) -> int:  # noqa: A002
    """Follow a detached run until it is over.

    Ctrl-C leaves it alone. Ends with 1 when it failed, and says how.

        skyfab attach 3f2a91c0
    """
    from skyfab.cli.runs import follow

    return follow(id, hosts, inventory)


@command(**SELECT, id=RUN)
def stop(_: Context, id: str, hosts: str | None = None, inventory: str | None = None) -> None:  # noqa: A002
    """End a detached run on all its hosts.

    Its ranks and what they started; what it wrote stays.

        skyfab stop 3f2a91c0
    """
    from skyfab.cli.runs import stop as end

    end([id], hosts, inventory)


@command(**SELECT, json="print a list for programs")
def hosts(_: Context, hosts: str | None = None, inventory: str | None = None, json: bool = False) -> int:
    """Show what each host is, or why it cannot be used.

    Address, Python, platform, CPUs and GPUs, all hosts at once. Ends with 3 when one of them cannot be used.

        skyfab hosts
        skyfab hosts --hosts=gpu --json
    """
    from skyfab.cli.hosts import hosts as run

    return run(hosts, inventory, as_json=json)


@command(**SELECT)
def stacks(_: Context, hosts: str | None = None, inventory: str | None = None) -> int:
    """Show where all ranks are right now, alike ones together.

    The Python stacks of every rank of yours on the hosts, whichever program started it, also when it is stuck in a
    collective: "3 ranks in all_reduce at …, 1 rank in load at …". Nothing is disturbed.

        skyfab stacks
        skyfab stacks --hosts=node1,node2
    """
    from skyfab.cli.stacks import stacks as run

    return run(hosts, inventory)


@command(**SELECT)
def exec_(_: Context, hosts: str | None = None, inventory: str | None = None) -> int:
    """Run a shell command on every host.

    exec [--hosts=…] -- COMMAND: it runs in the home folder there, by /bin/sh. As with ssh, the words after
    the dashes are joined with spaces: quote what the shell there should see. Ends with 1 when it failed anywhere.

        skyfab exec -- uptime
        skyfab exec --hosts=gpu -- 'nvidia-smi -L | wc -l'
    """
    from skyfab.cli.shell import shell

    return shell(" ".join(_after_dashes()), hosts, inventory)


@command(
    **SELECT,
    known_hosts="the file to record them in; else the one that ssh uses",
    replace="put the new key in the place of another one on record",
    yes="do not ask",
)
def trust(
    _: Context,
    hosts: str | None = None,
    inventory: str | None = None,
    known_hosts: str | None = None,
    replace: bool = False,
    yes: bool = False,
) -> int:
    """Record the keys of hosts that ssh does not know yet.

    Shows their fingerprints first. Compare them with what the host itself says, on its own screen:
    ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub

        skyfab trust --hosts=node1
        skyfab trust --hosts=node1 --replace
    """
    from skyfab.cli.trust import trust as run

    return run(hosts, inventory, known_hosts=known_hosts, replace=replace, yes=yes)


@command(
    "pip",
    "index",
    "apt",
    **SELECT,
    pip="packages, as pip would take them: numpy,torch>=2.6; may be given again",
    index="URL=package,package: an index for those packages and no others; may be given again",
    requirements="a file with a requirement in each line",
    apt="Debian packages; may be given again",
    install="push: everything comes from this machine; fetch: from the indexes; auto",
    upgrade="look for newer versions of what was resolved before",
    lock="write the versions to this pylock.toml, for Image(lock=…)",
)
def prepare(
    _: Context,
    hosts: str | None = None,
    inventory: str | None = None,
    pip: Sequence[str] | None = None,
    index: Sequence[str] | None = None,
    requirements: str | None = None,
    apt: Sequence[str] | None = None,
    install: str = "auto",
    upgrade: bool = False,
    lock: str | None = None,
) -> None:
    """Build an environment ahead, on all hosts at once.

    It is the one that a program finds there whose Image(pip=…, pip_indexes=…, apt=…) says the same.

        skyfab prepare --pip=numpy,torch
        skyfab prepare --hosts=gpu --requirements=requirements.txt --lock=pylock.toml
        skyfab prepare --pip=torch --index=https://download.pytorch.org/whl/cu126=torch
    """
    from skyfab.cli.prepare import image_of
    from skyfab.cli.prepare import prepare as run

    image = image_of(pip or (), index or (), requirements, apt or (), install)
    run(hosts, inventory, image, upgrade=upgrade, lock=lock)


@command(
    **SELECT,
    days="remove what has not been used for so many days; 30",
    here="clean what this machine keeps for hosts; without --hosts, nothing else",
)
def gc(
    _: Context, hosts: str | None = None, inventory: str | None = None, days: str = "30", here: bool = False
) -> None:
    """Remove from the hosts' caches what nobody has used for a while.

    Environments, packages, interpreters, project files, logs, and what was left half-made; and the working folders of
    projects, with what functions have written there: names and sizes are printed. What a pool is using stays, and so
    does what was used in the last hour: with --days=0 all the rest goes. With --here, the wheels, locks and tools that
    this machine keeps; where a lock goes, the next pool looks for the newest versions.

        skyfab gc
        skyfab gc --hosts=gpu --days=7
        skyfab gc --here
    """
    from skyfab.cli.gc import gc as run

    run(hosts, inventory, days=_count("days", days, least=0), here=here)


@command(
    count="how many hosts; 4",
    python="an interpreter of this machine that the hosts are lent, with its packages; else they have the system's own",
)
def up(_: Context, count: str = "4", python: str | None = None) -> None:
    """Start throw-away hosts on this machine.

    They are called node1, node2 …; the last line printed is the path of their inventory. What they are made with
    (openssh-server, iproute2) is installed first, where this is root on Debian.

        export SKYFAB_INVENTORY=$(skyfab lab.up --count=2)
        skyfab hosts
    """
    from skyfab import lab

    path = lab.up(_count("count", count), python=python)
    for host in lab.status():
        print(host, file=sys.stderr)
    print(f"hint: export SKYFAB_INVENTORY={path}", file=sys.stderr)
    print(path, flush=True)


@command()
def down(_: Context) -> None:
    """Take the throw-away hosts down.

    Nothing of them is left: no process, network or file.

        skyfab lab.down
    """
    from skyfab import lab

    print("the lab is down" if lab.down() else "there was no lab", file=sys.stderr)


@command()
def status(_: Context) -> None:
    """Show the throw-away hosts.

    Name, address, kind, and whether it is up: one line for each.

        skyfab lab.status
    """
    from skyfab import lab

    found = lab.status()
    for host in found:
        print(host)
    if not found:
        print("no lab is up\nhint: skyfab lab.up", file=sys.stderr)


namespace = Collection(
    *(train, run, runs, logs, attach, stop),
    *(hosts, stacks, exec_, trust, prepare, gc),
    Collection("lab", up, down, status),
)
"""All tasks of skyfab. To use them in your own tasks.py: ``from skyfab.cli import namespace``."""


def _after_dashes() -> list[str]:
    """The arguments after ``--``, which invoke does not pass on to a task."""
    return sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []


def _count(option: str, text: str, *, least: int = 1) -> int:
    """Parses a number. Raises UsageError, where invoke would print a traceback."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
        raise UsageError(f"--{option}={text[:40]}: a whole number from {least} on")
    return int(text)


class _Skyfab(Program):
    """invoke's program with skyfab's exit codes, and a help that begins with the tasks."""

    def parse_tasks(self) -> None:
        self._or_usage(super().parse_tasks)

    def parse_cleanup(self) -> None:
        self._or_usage(super().parse_cleanup)

    def _or_usage(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ParseError as error:
            raise Exit(f"error: {error}\nhint: {self.binary} --help", code=2) from None

    def task_list_opener(self, extra: str = "") -> str:
        return "Tasks"

    def print_help(self) -> None:
        print(f"Usage: {self.binary} TASK [--options]\n")
        self.list_tasks()
        print(f"{self.binary} --help TASK tells more about one of them.")


def main(argv: Sequence[str] | None = None, tasks: Collection = namespace) -> None:
    """Runs the `skyfab` program; with other `tasks`, that of a project."""
    program = _Skyfab(name="skyfab", version=__version__, namespace=tasks)
    with SIGTERM.as_interrupt():
        program.run(None if argv is None else list(argv))
