"""asyncssh: connections in one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncssh

from benchmarks.peers import session, work
from benchmarks.peers.site import Site


def command(site: Site, count: int) -> None:
    async def one(address: str) -> str:
        async with asyncssh.connect(address, config=[site.config]) as connection:
            return str((await connection.run("hostname", check=True)).stdout)

    async def every() -> list[str]:
        return await asyncio.gather(*map(one, site.first(count)))

    print("".join(asyncio.run(every())), end="")


def send(site: Site, name: str, count: int) -> None:
    async def one(address: str) -> None:
        async with asyncssh.connect(address, config=[site.config]) as connection:
            await asyncssh.scp(str(Path(site.folder) / name), (connection, site.target), recurse=name == "small")

    async def every() -> None:
        await asyncio.gather(*map(one, site.first(count)))

    asyncio.run(every())


if __name__ == "__main__":
    session.main(
        {
            "command": lambda site: command(site, 1),
            "commands": lambda site: command(site, work.MANY),
            "file": lambda site: send(site, "large", work.HOSTS),
            "folder": lambda site: send(site, "small", 1),
        }
    )
