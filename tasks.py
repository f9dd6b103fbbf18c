"""The project's own tasks, next to all that `skyfab` can do: `./inv --list`."""

import shlex
import subprocess
import sys
from pathlib import Path

from invoke import Context, Exit, task

from skyfab.cli.tasks import command, main
from skyfab.cli.tasks import namespace as ns
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
    soak="the tests that take minutes too",
    args="more arguments for pytest",
)
def test(_: Context, k: str | None = None, soak: bool = False, args: str = "") -> None:
    """Run the tests, after installing the programs that they and the lab need (root on Debian)."""
    programs.require()
    left = programs.install(TEST_PROGRAMS)
    if left:
        print(f"some tests will be skipped; for all of them: {programs.command(left)}", file=sys.stderr)
    select = ["-k", k] if k else []
    # An empty expression takes back the `not soak` of pyproject.toml.
    everything = ["-m", ""] if soak else []
    finish(python("-m", "pytest", *select, *everything, *shlex.split(args)))


@task
def check(_: Context) -> None:
    """Lint, formatting and types; all three, whatever the first one says."""
    codes = [python("-m", "ruff", "check"), python("-m", "ruff", "format", "--check"), python("-m", "mypy")]
    finish(max(codes))


@command(only="one benchmark, by its name")
def bench(_: Context, only: str | None = None) -> None:
    """Measure against raw ssh, execnet and torchrunx on the lab, and print the ratios."""
    programs.require()
    finish(python("-m", "benchmarks", *(["--only", only] if only else [])))


def python(*arguments: str) -> int:
    """Run this Python in the checkout, on the caller's own terminal: colours, bars and Ctrl-C work as ever."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode


def finish(code: int) -> None:
    """End with a child's exit code; one that a signal ended counts as a shell would count it."""
    if code:
        raise Exit(code=code if code > 0 else 128 - code)


for own in (test, check, bench):
    ns.add_task(own)

if __name__ == "__main__":
    main(["./inv", *sys.argv[1:]], tasks=ns)
