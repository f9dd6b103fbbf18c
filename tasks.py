"""The project's own tasks, next to all that `skyfab` can do: `./inv --list`."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from invoke import Context, Exit, task

from skyfab.cli import main
from skyfab.cli import namespace as ns

ROOT = Path(__file__).resolve().parent

LAB_PROGRAMS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "ps": "procps",
    "faketime": "faketime",
}
"""What the lab starts its hosts with, and what tests use there; each with the Debian package that has it."""


@task(
    help={
        "k": "only tests whose names match this expression",
        "soak": "the tests that take minutes too",
        "args": "more arguments for pytest",
    }
)
def test(_: Context, k: str | None = None, soak: bool = False, args: str = "") -> None:
    """Run the tests, after installing the programs that the lab needs (root on Debian)."""
    install_lab_programs()
    select = ["-k", k] if k else []
    # An empty expression takes back the `not soak` of pyproject.toml.
    everything = ["-m", ""] if soak else []
    finish(python("-m", "pytest", *select, *everything, *shlex.split(args)))


@task
def check(_: Context) -> None:
    """Lint, formatting and types; all three, whatever the first one says."""
    codes = [python("-m", "ruff", "check"), python("-m", "ruff", "format", "--check"), python("-m", "mypy")]
    finish(max(codes))


@task(help={"only": "one benchmark, by its name"})
def bench(_: Context, only: str | None = None) -> None:
    """Measure against raw ssh, execnet and torchrunx on the lab, and print the ratios."""
    finish(python("-m", "benchmarks", *(["--only", only] if only else [])))


def python(*arguments: str) -> int:
    """Run this Python in the checkout, on the caller's own terminal: colours, bars and Ctrl-C work as ever."""
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode


def finish(code: int) -> None:
    """End with a child's exit code; one that a signal ended counts as a shell would count it."""
    if code:
        raise Exit(code=code if code > 0 else 128 - code)


def install_lab_programs() -> None:
    """Fetch what is missing where that is possible; elsewhere the tests say what they could not do."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    packages = [package for program, package in LAB_PROGRAMS.items() if not shutil.which(program, path=path)]
    if not packages:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"missing for the lab, and only root can install it: {' '.join(packages)}", file=sys.stderr)
        return
    quiet = {"env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, "stdin": subprocess.DEVNULL}
    subprocess.run(["apt-get", "-qq", "update"], **quiet)
    if subprocess.run(["apt-get", "-qq", "install", "-y", "--no-install-recommends", *packages], **quiet).returncode:
        print(f"missing for the lab, and apt-get cannot install it: {' '.join(packages)}", file=sys.stderr)
        return
    if "openssh-server" in packages and Path("/run/systemd/system").exists():
        # Only the program is wanted: running tests must not leave a port 22 open.
        subprocess.run(["systemctl", "disable", "--now", "ssh.service", "ssh.socket"], **quiet)


for own in (test, check, bench):
    ns.add_task(own)

if __name__ == "__main__":
    main(["./inv", *sys.argv[1:]], tasks=ns)
