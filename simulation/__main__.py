"""``python -m simulation``: simulates a pool of many hosts, and prints what each phase took."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from simulation import memory
from simulation.scenario import Row, Scenario
from skyfab._util.sizes import readable

_DESCRIPTORS = 5
"""Of this machine for each connection: three pipes of ssh, and two with which its end and its stderr are noticed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if a promise was not kept."""
    options = _parser().parse_args(argv)
    seeds = range(options.seed, options.seed + options.seeds)
    for seed in seeds:
        scenario = Scenario(options.hosts, seed)
        try:
            scenario.run()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            _say_failed(scenario, error, options.hosts)
            return 1
        if len(seeds) > 1:
            print(f"seed {seed}: all promises kept, trace {'-'.join(scenario.traces)}", flush=True)
    if len(seeds) == 1:
        _show(scenario)
    return 0


def _say_failed(scenario: Scenario, error: BaseException, hosts: int) -> None:
    if not isinstance(error, AssertionError):
        traceback.print_exception(error)
    after = f", after {scenario.rows[-1].name!r}" if scenario.rows else ""
    print(f"seed {scenario.seed} failed{after}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"replay it: ./inv sim --hosts={hosts} --seed={scenario.seed}", file=sys.stderr)


def _show(scenario: Scenario) -> None:
    heads = ("", "simulated s", "messages", "heartbeats", "bytes out", "bytes in", "logins", "CPU s", "of hosts")
    lines = [heads, *map(_cells, scenario.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        print(first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)))
    opened, used = memory.of_a_host(scenario.hosts, scenario.seed)
    print()
    print(f"memory of this machine for each host: {readable(opened)} in an open pool, {readable(used)} after calls")
    print(f"threads of this machine, at most: {scenario.threads}")
    print(
        f"SSH connections, at most: {scenario.connections}, each with a process and {_DESCRIPTORS} descriptors "
        f"({scenario.connections * _DESCRIPTORS:,})"
    )
    print(f"all promises kept at seed {scenario.seed}; trace {'-'.join(scenario.traces)}")


def _cells(row: Row) -> tuple[str, ...]:
    counts = (row.messages, row.heartbeats)
    moved = (readable(row.bytes_out), readable(row.bytes_in))
    return (
        row.name,
        f"{row.seconds:.2f}",
        *(f"{count:,}" for count in counts),
        *moved,
        f"{row.logins:,}",
        f"{row.cpu:.2f}",
        f"{row.hosts_cpu:.2f}",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
