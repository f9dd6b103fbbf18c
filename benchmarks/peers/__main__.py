"""``python -m benchmarks.peers``: skyfab beside what users would take instead. `./inv bench --peers` runs it."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import skyfab
from benchmarks import chart
from benchmarks.arena import Arena
from benchmarks.facts import Facts
from benchmarks.peers import report, work
from benchmarks.peers.contest import Contest
from benchmarks.peers.contestants import CONTESTANTS, OURS, Contestant
from benchmarks.peers.environment import Environment
from benchmarks.peers.jobs import PROGRAMS, SESSIONS, TASTE, Size
from benchmarks.scale import Scale
from skyfab.errors import UsageError
from tools.bootstrap import SetupError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 whatever the figures are; 1 if skyfab failed at a job; 2 if there cannot be a lab."""
    options = _parser().parse_args(argv)
    try:
        environment = Environment.make(
            {each.package: each.requirements or each.package for each in CONTESTANTS if each.package}
        )
        peers = known(environment)
        with Arena.open(Scale(), hosts=work.MANY, lend=[str(environment.folder)]) as arena:
            if arena.lab.kind != "namespace":
                raise UsageError("peers need hosts that have their own addresses, and so namespaces: Linux")
            found = measure(arena, environment, peers, TASTE if options.quick else Size(), options.only)
    except (SetupError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(report.text(found)))
    written = options.json or (options.chart and options.chart.with_suffix(".json"))
    if written:
        written.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if options.chart:
        chart.drawn(found).write(options.chart)
    return 1 if found["notes"] else 0


def known(environment: Environment) -> list[dict[str, str]]:
    """The version of each contestant, or why it cannot take part."""
    versions = environment.versions([each.package for each in CONTESTANTS if each.package])
    return [_known(each, environment, versions) for each in CONTESTANTS]


def _known(each: Contestant, environment: Environment, versions: dict[str, str]) -> dict[str, str]:
    lacking = [program for program in each.programs if shutil.which(program) is None]
    if lacking:
        return {"name": each.name, "version": "", "why": f"{lacking[0]} is not installed on this machine"}
    if each.package and each.package not in versions:
        return {"name": each.name, "version": "", "why": environment.reasons.get(each.package, "not installed")}
    version = versions[each.package] if each.package else _version(each)
    return {"name": each.name, "version": version, "why": ""}


def _version(each: Contestant) -> str:
    """Of skyfab, or of a program of the system."""
    if each.name == OURS:
        return skyfab.__version__
    options = "--version" if each.name == "rsync" else "-V"
    program = "ssh" if each.name == "scp" else each.name
    said = subprocess.run([program, options], capture_output=True, text=True)
    words = (said.stdout + said.stderr).replace(",", " ").split()
    return words[2] if each.name == "rsync" else words[0].removeprefix("OpenSSH_")


def measure(
    arena: Arena, environment: Environment, peers: Sequence[Mapping[str, str]], size: Size, only: Sequence[str] = ()
) -> dict[str, Any]:
    """All jobs, or some of them; Ctrl-C ends it with what there is."""
    facts = Facts.of(arena)
    able = [each for each, found in zip(CONTESTANTS, peers, strict=True) if found["version"]]
    with Contest.open(arena, environment, size) as contest:
        started = time.monotonic()
        try:
            contest.programs(able, [job for job in PROGRAMS if not only or job.name in only])
            contest.sessions(able, [job for job in SESSIONS if not only or job.name in only])
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        print(f"{time.monotonic() - started:.0f} s in all", file=sys.stderr)
        return report.document(contest, able, peers, facts.document(), only)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--only", metavar="JOBS", type=_names, default=(), help="one job, or several with commas")
    parser.add_argument("--quick", action="store_true", help="a taste of everything, in a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the results there, and write FILE.json")
    return parser


def _names(text: str) -> list[str]:
    """The names of jobs. Raises ArgumentTypeError."""
    known = [job.name for job in (*PROGRAMS, *SESSIONS)]
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no job {name!r}; there are: {', '.join(known)}")
    return names


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left running
    sys.exit(main())
