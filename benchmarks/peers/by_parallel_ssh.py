"""parallel-ssh: libssh2 on many hosts, in greenlets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gevent import joinall  # type: ignore[import-untyped]
from pssh.clients import ParallelSSHClient

from benchmarks.peers import session, work
from benchmarks.peers.site import Site


def _client(site: Site, count: int) -> Any:
    return ParallelSSHClient(list(site.first(count)), user=site.user, pkey=site.key)


def command(site: Site, count: int) -> None:
    output = _client(site, count).run_command("hostname")
    print("\n".join(line for host in output for line in host.stdout))


def file(site: Site) -> None:
    """By scp, which its documentation calls the faster way."""
    client = _client(site, work.HOSTS)
    joinall(client.scp_send(str(Path(site.folder) / "large"), f"{site.target}/large"), raise_error=True)


def folder(site: Site) -> None:
    client = _client(site, 1)
    copied = client.copy_file(str(Path(site.folder) / "small"), f"{site.target}/small", recurse=True)
    joinall(copied, raise_error=True)


if __name__ == "__main__":
    session.main(
        {
            "command": lambda site: command(site, 1),
            "commands": lambda site: command(site, work.MANY),
            "file": file,
            "folder": folder,
        }
    )
