"""`skyfab prepare`: builds an environment on hosts in advance, and optionally writes its lock file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from skyfab.cli.command import InventoryFile, Json, NamedHosts, Option, command
from skyfab.cli.image_options import Apt, ImageOptions, Index, Install, Pip, Python, Requirements
from skyfab.errors import UsageError


@command
def prepare(
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    pip: Pip = (),
    index: Index = (),
    requirements: Requirements = None,
    apt: Apt = (),
    install: Install = "auto",
    python: Python = "auto",
    upgrade: Annotated[bool, Option("look for newer versions of what was resolved before")] = False,
    lock: Annotated[str | None, Option("write the versions to this pylock.toml, for Image(lock=…)", "FILE")] = None,
    json_: Json = False,
) -> None:
    """Build an environment ahead, on all hosts at once.

    It is the one that a program finds there whose Image(pip=…, pip_indexes=…, apt=…) says the same.

        skyfab prepare --pip=numpy,torch
        skyfab prepare --hosts=gpu --requirements=requirements.txt --lock=pylock.toml
        skyfab prepare --pip=torch --index=https://download.pytorch.org/whl/cu126=torch
    """
    from skyfab.cli.environment import build, look_for_newer, write_lock
    from skyfab.cli.host_selection import selected

    options = ImageOptions(pip=pip, index=index, requirements=requirements, apt=apt, install=install, python=python)
    image = replace(options.image(), excludes=("*",))  # nothing of the caller's project is needed
    if lock is not None and not image.pip:
        raise UsageError("--lock writes down packages, and there are none", hint="name some: --pip=numpy")
    found, chosen = selected(hosts, inventory, quiet=json_)
    if upgrade:
        look_for_newer(image, chosen, found)
    build(image, chosen, found, as_json=json_)
    if lock is not None:
        write_lock(Path(lock), image, chosen, quiet=json_)
