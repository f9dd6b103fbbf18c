"""fabric: commands and files on a group of connections, in threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabric import Config, ThreadingGroup

from benchmarks.peers import session, work
from benchmarks.peers.site import Site


def _group(site: Site, count: int) -> Any:
    return ThreadingGroup(*site.first(count), user=site.user, config=Config(runtime_ssh_path=site.config))


def command(site: Site, count: int) -> None:
    with _group(site, count) as group:
        print("".join(result.stdout for result in group.run("hostname", hide=True).values()), end="")


def file(site: Site) -> None:
    with _group(site, work.HOSTS) as group:
        group.put(str(Path(site.folder) / "large"), f"{site.target}/large")


if __name__ == "__main__":
    session.main(
        {"command": lambda site: command(site, 1), "commands": lambda site: command(site, work.MANY), "file": file}
    )
