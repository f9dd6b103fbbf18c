"""`skyfab put` and `skyfab get`: copy files and folders to hosts and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import InventoryFile, NamedHosts, Option, command
from skyfab.errors import SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.files.transfer import Report
    from skyfab.pool.compute import Compute


@command
def put(
    path: Annotated[str, Option("a file or folder on this machine", "PATH")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[
        str | None, Option("the path on the hosts; with a slash at the end, the folder to put it into", "PATH")
    ] = None,
) -> None:
    """Copy a file or folder to every host.

    Relative paths on the hosts are in the working folder, which programs that you start in the current folder use too.
    Without --to, the path is the same as on this machine. Skips files that the hosts already have with the same
    content, and resumes interrupted transfers.

        skyfab put data --hosts=gpu
        skyfab put model.pt --hosts=node1 --to=/scratch/models/
    """
    from skyfab._util.suggest import similar_path
    from skyfab.pool.files import local_path

    local = local_path(path)
    if not local.exists():
        if local.is_symlink():
            raise UsageError(f"broken link: {path} points to {local.readlink()}")
        raise UsageError(f"no such file or folder: {path}", hint=similar_path(local))
    with _pool(hosts, inventory) as compute:
        _tell(compute.upload(path, to=to))


@command
def get(
    path: Annotated[str, Option("a file, a folder or a pattern on the hosts", "PATH")],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    to: Annotated[str, Option("the folder on this machine to put them into", "FOLDER")] = ".",
) -> None:
    """Copy files and folders from hosts.

    Relative paths are in the working folder on the hosts, and are kept below the folder on this machine; quote
    patterns. From several hosts, files that more than one of them has go into a folder for each host. Skips files that
    this machine already has with the same content, and resumes interrupted transfers.

        skyfab get 'ckpt/*' --hosts=node1
        skyfab get /var/log/syslog --hosts=gpu --to=logs
    """
    with _pool(hosts, inventory) as compute:
        _tell([report for report in compute.download(path, to=to) if report.entries])  # others are reported already


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
            for node in compute.hosts:
                node.owner = ""  # it is the project's folder also while a run uses that
            yield compute
    except OSError as error:
        if isinstance(error, SkyfabError):
            raise
        raise SkyfabError(words(error)) from error


def _tell(reports: Sequence[Report]) -> None:
    from skyfab.ui.terminal import clean

    for report in reports:
        print(clean(str(report)))
