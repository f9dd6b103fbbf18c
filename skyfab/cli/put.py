"""`skyfab put` and `skyfab get`: files and folders to hosts and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import InventoryFile, NamedHosts, Option, command
from skyfab.errors import SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.files.transfer import Report
    from skyfab.pool.compute import Compute


@command
def put(
    path: Annotated[str, Option("a file or folder of this machine", "PATH")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[
        str | None, Option("where it will be there; with a slash at the end, the folder that it goes into", "PATH")
    ] = None,
) -> None:
    """Copy a file or folder to every host.

    A relative path there begins in the working folder, which the functions of programs that you start in this folder
    see too. Without --to it has the same place there as here. What is there already with the same content is not sent,
    and what was interrupted goes on where it stopped.

        skyfab put data --hosts=gpu
        skyfab put model.pt --hosts=node1 --to=/scratch/models/
    """
    from skyfab.cli.script_argument import near

    if not Path(path).expanduser().exists():
        if Path(path).expanduser().is_symlink():
            raise UsageError(f"{path} is a link to {Path(path).expanduser().readlink()}, which is not there")
        raise UsageError(f"there is no {path} here", hint=near(Path(path).expanduser()))
    with _pool(hosts, inventory) as compute:
        _tell(compute.upload(path, to=to))


@command
def get(
    path: Annotated[str, Option("a file, a folder or a pattern there", "PATH")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[str, Option("the folder of this machine that it goes into", "FOLDER")] = ".",
) -> None:
    """Copy files and folders from hosts.

    A relative path begins in the working folder there, and keeps its place below the folder here; quote patterns. From
    several hosts, each into a folder of the host's name. What is here already with the same content is not sent, and
    what was interrupted goes on where it stopped.

        skyfab get 'ckpt/*' --hosts=node1
        skyfab get /var/log/syslog --hosts=gpu --to=logs
    """
    with _pool(hosts, inventory) as compute:
        _tell([report for report in compute.download(path, to=to) if report.entries])  # of the others it has told


@contextmanager
def _pool(hosts: str | None, inventory: str | None) -> Iterator[Compute]:
    """A pool whose hosts are sent no modules. An error of this machine's files is a message, as one of a host's is."""
    from skyfab.calls.image import Image
    from skyfab.cli.host_selection import selected
    from skyfab.files.entries import words
    from skyfab.pool.compute import Compute

    found, chosen = selected(hosts, inventory)
    try:
        with Compute(chosen, inventory=found, image=Image(excludes=("*",))) as compute:
            yield compute
    except OSError as error:
        if isinstance(error, SkyfabError):
            raise
        raise SkyfabError(words(error)) from error


def _tell(reports: Sequence[Report]) -> None:
    from skyfab.ui.terminal import clean

    for report in reports:
        print(clean(str(report)))
