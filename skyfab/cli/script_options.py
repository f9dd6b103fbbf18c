"""The options that say where a script runs and in which environment, for all commands that run one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import InventoryFile, NamedHosts, Nodes, Option, Where, Workdir
from skyfab.cli.image_options import ImageOptions

if TYPE_CHECKING:
    from skyfab.cli.project_settings import ProjectSettings
    from skyfab.plugins.base import Plugin
    from skyfab.pool.compute import Compute


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(ImageOptions):
    """The values of these options."""

    hosts: NamedHosts = None
    inventory: InventoryFile = None
    container: Annotated[str, Option("run in this container or apptainer image of each host", "NAME|IMAGE")] = ""
    where: Where = None
    nodes: Nodes = None
    workdir: Workdir = "auto"
    lock: Annotated[str | None, Option("install the packages of this pylock.toml", "FILE")] = None
    env: Annotated[
        Sequence[str], Option("set a variable; without a value, copy it from this shell; repeatable", "NAME[=VALUE]")
    ] = ()
    env_file: Annotated[
        Sequence[str], Option("read variables from a file with lines NAME=VALUE; repeatable", "FILE")
    ] = ()
    no_project: Annotated[bool, Option("install no packages of the script or project ([tool.skyfab] applies)")] = False

    def project(self, script: Path) -> ProjectSettings:
        """Continues with the Python of the script's project. Returns the project's settings. Raises UsageError."""
        from skyfab.cli.interpreter import hand_over
        from skyfab.cli.project_settings import ProjectSettings

        if not self.no_project:
            hand_over(script)
        return ProjectSettings.of(script)

    def pool(
        self, script: Path, settings: ProjectSettings, *, ranks: int | None, here: int, plugins: Sequence[Plugin]
    ) -> Compute:
        """The pool for a script; without hosts and inventory, with `here` ranks on this machine. Raises UsageError."""
        from skyfab.cli.host_selection import selected
        from skyfab.cli.run_environment import image_of, variables_of
        from skyfab.pool.compute import Compute

        hosts = self.hosts or settings.hosts
        found, chosen = selected(hosts, self.inventory or settings.inventory)
        if self.container:
            chosen = tuple(host.in_container(self.container) for host in chosen)
        if hosts is None and found.source is None:
            ranks = ranks or here
        image = image_of(script, self, settings, chosen, no_project=self.no_project)
        return Compute(
            chosen,
            inventory=found,
            where=self.where,
            nodes=self.nodes,
            ranks=ranks or "auto",
            image=replace(image, program=str(script)),
            plugins=plugins,
            env=variables_of(self.env, self.env_file, settings),
            workdir=settings.workdir if self.workdir == "auto" else self.workdir,
        )
