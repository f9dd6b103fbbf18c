"""The project's own tasks, next to all that `skyfab` can do: `./inv --list`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from invoke import Context, Exit, task

from skyfab.cli import main
from skyfab.cli import namespace as ns
from skyfab.cli.tasks import command
from skyfab.lab import programs

ROOT = Path(__file__).resolve().parent

TEST_PROGRAMS = {
    **{
        name: name
        for name in ("bash", "busybox", "curl", "dash", "faketime", "fish", "ksh", "mksh", "tcsh", "wget", "zsh")
    },
    "ps": "procps",
}
"""What tests use on hosts, each with the Debian package that has it."""


@command(
    k="only tests whose names match this expression",
    fast="unit tests and calls over one transport: under two minutes",
    soak="the tests that take minutes too",
    python="the fast tests with another Python, for example 3.12",
    args="more arguments for pytest",
)
def test(
    _: Context, k: str | None = None, fast: bool = False, soak: bool = False, python: str | None = None, args: str = ""
) -> None:
    """Run the tests, after installing the programs that they and the lab need (root on Debian)."""
    programs.require()
    left = programs.install(TEST_PROGRAMS)
    if left:
        print(f"some tests will be skipped; for all of them: {programs.command(left)}", file=sys.stderr)
    program = sys.executable if python is None else other_python(python)
    options = ["--fast"] if fast or python else ["-m", ""] if soak else []
    if k:
        options += ["-k", k]
    else:
        print(f"about {'2 minutes' if fast or python else '2 hours' if soak else '10 minutes'}", file=sys.stderr)
        options += ["-n", str(workers()), "--durations=15"]
    finish(run(program, "-m", "pytest", *options, *shlex.split(args)))


def workers() -> int:
    """Most tests wait for something: one more than there are cores."""
    return min(8, len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else 4)


def other_python(version: str) -> str:
    """The Python of an environment for the fast tests. Ends with what is missing where there is none."""
    made = subprocess.run(
        [sys.executable, "-I", "tools/bootstrap.py", "--python", version], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    finish(made.returncode)
    return made.stdout.strip()


@task
def check(_: Context) -> None:
    """Lint, formatting and types; all three, whatever the first one says."""
    codes = [
        run(sys.executable, "-m", *words) for words in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"])
    ]
    finish(max(codes))


@command(only="one benchmark, by its name")
def bench(_: Context, only: str | None = None) -> None:
    """Measure against raw ssh, execnet and torchrunx on the lab, and print the ratios."""
    programs.require()
    finish(run(sys.executable, "-m", "benchmarks", *(["--only", only] if only else [])))


def run(*words: str) -> int:
    """Run a program in the checkout, on the caller's own terminal: colours, bars and Ctrl-C work as ever."""
    return subprocess.run(words, cwd=ROOT).returncode


def finish(code: int) -> None:
    """End with a child's exit code; one that a signal ended counts as a shell would count it."""
    if code:
        raise Exit(code=code if code > 0 else 128 - code)


for own in (test, check, bench):
    ns.add_task(own)

if __name__ == "__main__":
    main(["./inv", *sys.argv[1:]], tasks=ns)
