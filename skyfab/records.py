"""Records: what hosts have kept of detached runs, read through a plain shell. `agent.record` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from skyfab.inventory import Host
from skyfab.shell import Shell

State = Literal["running", "done", "failed", "stopped", "lost", "unreachable"]
_CHUNK: Final = 1024 * 1024
_LOG: Final = re.compile(r"(\d{1,9}\.(?:out|err)(?:\.1)?) (\d{1,15})")
"""A log's name (its rank, its stream, ``.1`` for the file before the last) and size."""

ALIVE: Final = """
# the agent of the run in this folder lives
alive() {
  read -r pid boot folder <"$1/agent" 2>/dev/null || return 1
  test "$boot" = "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo '?')" || return 1
  if test -d /proc/self; then test "$(readlink "/proc/$pid/cwd" 2>/dev/null)" = "$folder"
  else kill -0 "$pid" 2>/dev/null; fi
}
"""
_LOOK: Final = (
    ALIVE
    + """
for d in "$c"/runs/$r; do
  test -s "$d/about" || continue
  if alive "$d"; then a=yes; else a=no; fi
  echo "=run ${d##*/} $a"
  head -c 65536 "$d/about"; echo
  head -c 65536 "$d/status"; echo
  l=
  for f in $(cd "$d/logs" 2>/dev/null && ls -t); do
    l=$(tail -c 2000 "$d/logs/$f" | tr -d '\\000' | grep . | tail -n 1)
    test -z "$l" || break
  done
  printf '%s\\n' "$l"
done
true
"""
)
_GPUS: Final = """
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits 2>/dev/null | sed 's/^/=gpu /'
true
"""
_STOP: Final = (
    ALIVE
    + """
alive "$d" || exit 0
kill -TERM "$pid"
set -- 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20
for i; do alive "$d" || exit 0; sleep 0.5; done
echo "process $pid has not ended after 10 s; wait, or end it there: kill -9 $pid"
exit 1
"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one host has of a run."""

    host: str
    about: dict[str, Any]
    state: State
    started: float
    ranks: dict[int, str]
    last: str
    """The last line that a rank wrote there."""
    gpus: tuple[str, ...] = ()
    """For each GPU of the host how busy it is, in percent, and the megabytes in use."""


def look(host: Host, shell: Shell, run: str | None = None) -> list[Part]:
    """What a host has of all runs; or of one, and then nothing of its GPUs: that may take a second."""
    text = shell.run(f"r='*'\n{_LOOK}{_GPUS}" if run is None else f"r={run}\n{_LOOK}")
    gpus = tuple(line.removeprefix("=gpu ") for line in text.splitlines() if line.startswith("=gpu "))
    found = []
    for piece in text.split("=run ")[1:]:
        lines = piece.splitlines()
        try:
            name, alive = lines[0].split()
            about, status = json.loads(lines[1]), json.loads(lines[2])
            found.append(
                _part(host.name, name, alive == "yes", about, status, lines[3] if len(lines) > 3 else "", gpus)
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            continue  # half-written, or not ours
    return found


def _part(
    host: str, name: str, alive: bool, about: dict[str, Any], status: dict[str, Any], last: str, gpus: tuple[str, ...]
) -> Part:
    state = status["state"]
    if about["id"] != name or not name.isalnum() or state not in ("running", "done", "failed", "stopped"):
        raise ValueError(name)
    about = {**about, "hosts": [str(one) for one in about["hosts"]], "ranks": [int(rank) for rank in about["ranks"]]}
    ranks = {int(rank): str(how) for rank, how in status["ranks"].items()}
    return Part(
        host=host,
        about=about,
        state="lost" if state == "running" and not alive else state,
        started=float(status["started"]),
        ranks=ranks,
        last=last,
        gpus=gpus,
    )


def stop(shell: Shell, run: str) -> None:
    """Ends its agent there, and waits for that. Raises ScriptFailed."""
    shell.run(f'd="$c"/runs/{run}\n{_STOP}')


# ---- logs


class Tail:
    """How far a log has been read."""

    def __init__(self) -> None:
        self.offset = 0
        self.rest = b""


def new_lines(
    shell: Shell, run: str, only: int | None, tails: dict[tuple[str, str], Tail], *, rest: bool
) -> Iterator[tuple[int, str, str]]:
    """The lines that have come to the logs on a host since the last time; with `rest` half ones too."""
    folder = f'"$c"/runs/{run}/logs'
    listed = shell.run(f'cd {folder} 2>/dev/null || exit 0; for f in *; do echo "$f $(wc -c <"$f")"; done').splitlines()
    sizes = {found[1]: int(found[2]) for line in listed if (found := _LOG.fullmatch(line))}
    for name in sorted(name for name in sizes if not name.endswith(".1")):
        rank, stream = name.split(".")
        if only is not None and int(rank) != only:
            continue
        tail = tails.setdefault((shell.host.name, name), Tail())
        pieces = [(name, sizes[name])]
        if sizes[name] < tail.offset or (not tail.offset and f"{name}.1" in sizes):
            pieces.insert(0, (f"{name}.1", sizes.get(f"{name}.1", 0)))  # another file was begun since
        for place, (file, size) in enumerate(pieces):
            if place:
                tail.offset = 0
            while tail.offset < size:
                data = bytes(shell.read(f"{folder}/{file}", tail.offset, min(_CHUNK, size - tail.offset)))
                if not data:
                    break
                tail.offset += len(data)
                *lines, tail.rest = (tail.rest + data).split(b"\n")
                yield from ((int(rank), stream, each.decode(errors="replace")) for each in lines)
        if rest and tail.rest:
            yield int(rank), stream, tail.rest.decode(errors="replace")
            tail.rest = b""
