"""`skyfab put` and `skyfab get`: files and folders to hosts and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Hosts, InventoryFile, Option, command

if TYPE_CHECKING:
    from skyfab.files.transfer import Report
    from skyfab.pool.compute import Compute


@command
def put(
    path: Annotated[str, Option("a file or folder of this machine", "PATH")],
    hosts: Hosts = None,
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
    with _pool(hosts, inventory) as compute:
        _tell(compute.upload(path, to=to))


@command
def get(
    path: Annotated[str, Option("a file, a folder or a pattern there", "PATH")],
    hosts: Hosts = None,
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
        _tell(compute.download(path, to=to))


def _pool(hosts: str | None, inventory: str | None) -> Compute:
    from skyfab.calls.image import Image
    from skyfab.pool.compute import Compute

    return Compute(hosts, inventory=inventory, image=Image(excludes=("*",)))  # no modules are sent


def _tell(reports: Sequence[Report]) -> None:
    from skyfab.ui.terminal import clean

    for report in reports:
        print(clean(str(report)))
