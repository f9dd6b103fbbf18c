"""The project's own tasks, next to all that `skyfab` can do: `./inv --list`."""

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

from skyfab.cli.command import Exit, Option, command
from skyfab.cli.tasks import COMMANDS, main
from skyfab.lab import programs
from tools import groups

ROOT = Path(__file__).resolve().parent

TEST_PROGRAMS = {
    **{
        name: name
        for name in ("bash", "busybox", "curl", "dash", "faketime", "fish", "ksh", "mksh", "tcsh", "wget", "zsh")
    },
    f"/usr/lib/{platform.machine()}-linux-gnu/security/pam_oath.so": "libpam-oath",
    **programs.USERS,
    **{name: name for name in ("debootstrap", "iptables", "podman", "rsync", "runc", "tmux")},
    "ps": "procps",
    "shellcheck": "shellcheck",
}
"""What tests use, on hosts and here, programs and modules for PAM, each with the Debian package that has it."""
_PYTHON = "python{}.{}".format(*sys.version_info)
if Path(f"/usr/bin/{_PYTHON}").exists():  # else Debian does not have CPython's own tests in this version
    TEST_PROGRAMS[f"/usr/lib/{_PYTHON}/test/test_abc.py"] = f"lib{_PYTHON}-testsuite"


class Tier(NamedTuple):
    options: list[str]
    """For pytest."""
    minutes: int


TIERS = {
    "fast": Tier(["--fast"], 2),
    "": Tier([], 10),
    "slow": Tier(["-m", "slow and not soak"], 20),
    "soak": Tier(["-m", ""], 120),
}
"""What `./inv test` runs, by option."""


@command
def test(
    k: Annotated[str | None, Option("only tests whose names match this expression")] = None,
    fast: Annotated[bool, Option("unit tests, and calls without SSH")] = False,
    slow: Annotated[bool, Option("only the tests that the default run skips because each takes seconds")] = False,
    soak: Annotated[bool, Option("all tests, including those that take minutes")] = False,
    python: Annotated[str | None, Option("the fast tests with another Python, for example 3.12", "VERSION")] = None,
    processes: Annotated[
        int | None,
        Option("parallel processes, each with its own labs (default: cores, one more without --slow; at most 4)", "N"),
    ] = None,
    args: Annotated[str, Option("more arguments for pytest")] = "",
) -> None:
    """Run the tests, after installing the programs that they and the lab need (root on Debian)."""
    programs.require()
    left = programs.install(TEST_PROGRAMS)
    if left:
        print(f"some tests will be skipped; for all of them: {programs.command(left)}", file=sys.stderr)
    program = sys.executable if python is None else other_python(python)
    tier = "fast" if fast or python else "soak" if soak else "slow" if slow else ""
    options = TIERS[tier].options
    if k or args:
        chosen = options or ["-m", "not soak"]
        finish(run(program, "-m", "pytest", *chosen, *(["-k", k] if k else []), *shlex.split(args)))
        return
    print(f"about {TIERS[tier].minutes} minutes on two cores", file=sys.stderr)
    count = processes or min(4, (os.cpu_count() or 1) + (tier != "slow"))  # the others wait for a third of their time
    options = [*options, "--durations=15"]
    finish(groups.run(program, count, options) if count > 1 else run(program, "-m", "pytest", *options))


def other_python(version: str) -> str:
    """The Python of an environment for the fast tests. Ends with what is missing where there is none."""
    made = subprocess.run(
        [sys.executable, "-I", "tools/bootstrap.py", "--python", version], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    finish(made.returncode)
    return made.stdout.strip()


@command
def mutate(
    module: Annotated[str, Option("a file below skyfab/", "MODULE")],
    count: Annotated[int, Option("the number of random changes", "N")] = 20,
    tests: Annotated[str, Option("the tests to run (default: those that import the module)")] = "",
    seed: Annotated[int, Option("selects the changes; the same seed repeats them", "N", least=0)] = 1,
) -> None:
    """Change a module at random places, one at a time, and see whether its tests notice."""
    name = module.removeprefix("skyfab/").removesuffix(".py")
    finish(run(sys.executable, "tools/mutate.py", name, str(count), str(seed), *shlex.split(tests)))


@command
def check() -> None:
    """Check style, formatting and types; runs all three even if one fails."""
    codes = [
        run(sys.executable, "-m", *words) for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    ]
    finish(max(codes))


@command
def bench(
    only: Annotated[str | None, Option("names of benchmarks, separated by commas", "NAMES")] = None,
    peers: Annotated[
        bool, Option("what users would take instead, job by job (ssh, rsync, fabric, execnet, Dask, Ray …): 10 minutes")
    ] = False,
    json: Annotated[str | None, Option("write the results there too", "FILE")] = None,
    chart: Annotated[str | None, Option("draw a chart of the results, and write them to FILE.json", "FILE.svg")] = None,
) -> None:
    """Measure against raw ssh, execnet and torchrunx on the lab, and print the ratios: 12 minutes on two cores."""
    programs.require()
    programs.install({name: name for name in (("rsync",) if peers else ("debootstrap", "podman", "runc"))})
    options = ["--only", only] if only else []
    for option, path in (("--json", json), ("--chart", chart)):
        options += [option, str(Path(path).resolve())] if path else []
    finish(run(sys.executable, "-m", "benchmarks.peers" if peers else "benchmarks", *options))


@command
def sim(
    hosts: Annotated[int, Option("simulated hosts of the pool", "N")] = 1000,
    seed: Annotated[int, Option("what the links, the order of threads and the faults depend on", "N", least=0)] = 1,
    seeds: Annotated[int, Option("how many seeds to try, from --seed on; ends at the first that fails", "N")] = 1,
) -> None:
    """Simulate a pool of many hosts in one process: open, @, map, lost hosts, relay. Exits with 1 if a promise fails.

    The client is skyfab's own code, on simulated threads, clock and network; hosts are models that answer with real
    frames. The table shows simulated seconds, messages and bytes for each phase, and the real CPU time. The same seed
    gives the same run. 1,000 hosts take about two minutes, 50 a few seconds. docs/scale.md explains the figures.

      ./inv sim --hosts=1000 --seed=7
      ./inv sim --hosts=50 --seeds=20      prints the command that replays the first failing seed
    """
    options = [f"--hosts={hosts}", f"--seed={seed}", f"--seeds={seeds}"]
    finish(run(sys.executable, "-m", "simulation", *options))


@command
def docs(
    serve: Annotated[bool, Option("then serve it on 127.0.0.1 until Ctrl-C")] = False,
    record: Annotated[
        bool, Option("type README's commands on two lab hosts, and draw docs/pictures/terminal.svg")
    ] = False,
) -> None:
    """Draw the pictures and build the documentation into build/docs. Warnings and broken links are errors."""
    if record:
        programs.require()
        finish(run(sys.executable, "-m", "tools.record"))
    finish(run(sys.executable, "-m", "tools.pictures"))
    options = [
        "-q",
        "--fresh-env",
        "--write-all",
        "--fail-on-warning",
        "--keep-going",
        "--conf-dir=docs",
        "--doctree-dir=build/doctrees",
    ]
    finish(run(sys.executable, "-m", "sphinx", *options, ".", "build/docs"))
    print("build/docs/index.html", file=sys.stderr)
    if serve:
        finish(run(sys.executable, "-m", "http.server", "--bind=127.0.0.1", "--directory=build/docs"))


def run(*words: str) -> int:
    """Run a program in the checkout, on the caller's own terminal: colours, bars and Ctrl-C work as ever."""
    return subprocess.run(words, cwd=ROOT).returncode


def finish(code: int) -> None:
    """End with a child's exit code; one that a signal ended counts as a shell would count it."""
    if code:
        raise Exit(code=code if code > 0 else 128 - code)


if __name__ == "__main__":
    own = {command.name: command for command in (test, check, bench, docs, mutate, sim)}
    main(["./inv", *sys.argv[1:]], commands={**COMMANDS, **own})
