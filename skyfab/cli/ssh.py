"""`skyfab ssh`: a shell on a host, in the project's folder and environment, or in those of a run."""

from __future__ import annotations

import os
import posixpath
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab._util.hints import HINTS
from skyfab.cli.command import InventoryFile, Option, command
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory
    from skyfab.session.interactive import InteractiveShell


@command
def ssh(
    host: Annotated[str, Option("a host of the inventory, user@10.0.0.5:2222, or local", "HOST")],
    *words: Annotated[str, Option("a command to run instead of a shell", "[-- COMMAND]")],
    run: Annotated[
        str | None, Option("start in the folder and environment of this detached run: its ID or its name", "RUN")
    ] = None,
    inventory: InventoryFile = None,
) -> None:
    """Open a shell on a host.

    Starts in the working folder, where run and put keep the files of the current folder, with the setup lines and
    variables of a run, with this project's environment first in PATH, and with the modules that the last run sent in
    PYTHONPATH. As with ssh, the words after -- are joined with spaces. Replaces itself with ssh, which prompts for
    passwords. Exits with the shell's exit code.

        skyfab ssh node1
        skyfab ssh node1 -- 'python -c "import torch; print(torch.__version__)"'
        skyfab ssh node1 --run=night
    """
    from skyfab.cli.host_selection import selected_one

    found, chosen = selected_one(host, inventory)
    if chosen.transport != "local" and shutil.which("ssh") is None:
        raise UsageError("ssh is not installed on this machine", hint="install the OpenSSH client")
    line = " ".join(words)
    entrance = _of_run(run, chosen, found, line) if run else of_project(chosen, line)
    if not entrance.programs and not entrance.otherwise:
        print(f"{chosen.name}: this project has no environment", file=sys.stderr)
    argv = entrance.argv(found, terminal=sys.stdin.isatty())
    sys.stdout.flush()
    if chosen.is_here:
        os.environ.update(entrance.variables)
    os.execvp(argv[0], argv)


def of_project(host: Host, command: str) -> InteractiveShell:
    """The folder, environment and modules that `skyfab run` uses."""
    from skyfab.cli.run_environment import ProjectSettings, image_of, variables_of
    from skyfab.env.prepare import Preparation
    from skyfab.pool.workdir import Workdirs, last_run
    from skyfab.session.bootstrap import local_python
    from skyfab.session.interactive import InteractiveShell

    script = Path.cwd() / "main.py"  # need not be there: its folder counts
    settings = ProjectSettings.of(script)
    image = image_of(script, None, settings, [host], no_project=False)
    preparation = Preparation(image, [host], local_python())
    python = image.python if image.python.startswith("/") else host.python
    otherwise = ""
    if python.startswith("/"):
        programs = posixpath.dirname(python)
    elif preparation.is_empty:
        programs = posixpath.dirname(sys.executable) if host.is_here else ""
    else:
        programs = preparation.guess(host).rpartition("/")[0]
        hint = HINTS.adapted(f"skyfab prepare --hosts={host.name}")
        otherwise = f"the environment of this project has not been built yet; to build it: {hint}"
    return InteractiveShell(
        host=host,
        folder=Workdirs(settings.workdir).of(host).sent or "~",
        programs=programs,
        otherwise=otherwise,
        tree=last_run().read_text() if last_run().is_file() else "",
        setup="\n".join(filter(None, (host.setup, image.setup))),
        variables={**host.env, **image.env, **variables_of((), (), settings)},
        command=command,
    )


def _of_run(name: str, host: Host, inventory: Inventory, command: str) -> InteractiveShell:
    from skyfab.detached.find import attach
    from skyfab.session.interactive import InteractiveShell

    run = attach(name, [host], inventory=inventory, results="data")
    about = next(part.about for part in run.parts if part.host == host.name)
    return InteractiveShell(
        host=host,
        folder=about.workdir or f"{host.cache.rstrip('/')}/runs/{run.id}",
        programs=posixpath.dirname(about.python),
        otherwise="the environment of this run is unknown",
        setup=host.setup,
        variables=host.env,
        command=command,
    )
