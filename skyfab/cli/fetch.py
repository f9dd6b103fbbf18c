"""`skyfab fetch`: fetches models, data sets and other files of servers into the caches of hosts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from skyfab.cli.command import InventoryFile, NamedHosts, Option, command


@command
def fetch(
    source: Annotated[
        str,
        Option("hf://ORG/MODEL or hf://datasets/ORG/NAME, with @REVISION, or https://HOST/FILE#sha256=HEX", "SOURCE"),
    ],
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    include: Annotated[Sequence[str], Option("fetch only files that match; repeatable", "PATTERN")] = (),
    exclude: Annotated[Sequence[str], Option("skip files that match; repeatable", "PATTERN")] = (),
) -> None:
    """Fetch a model or a file into the cache of every host.

    Models and data sets of the Hugging Face hub are laid out as by its own library, so functions, runs and shells on
    the hosts find them: from_pretrained("org/model"). Other files go into the cache's folder "fetched". Prints the
    path on each host. Hosts that reach the server download different files and pass them on to the others; if no host
    reaches it, this machine downloads. Checks every file against its hash. Ctrl-C keeps what has arrived; repeat the
    command to continue. Uses HF_TOKEN for models that need a token, and HF_ENDPOINT for another hub. If a host fails,
    the others get everything, and the command exits with 3.

        skyfab fetch hf://org/model --hosts=gpu
        skyfab fetch hf://org/model@v2 --include='*.safetensors' --include='*.json'
        skyfab fetch hf://datasets/org/name
        skyfab fetch https://example.org/weights.bin#sha256=…
    """
    from skyfab.cli.host_selection import selected
    from skyfab.cli.put import file_pool
    from skyfab.ui.terminal import clean

    with file_pool(*selected(hosts, inventory)) as compute:
        try:
            reports = compute.fetch(source, include=include, exclude=exclude)
        except KeyboardInterrupt:
            print("what has arrived is kept; repeat the command to continue", file=sys.stderr)
            raise
        for one in reports:
            print(clean(str(one)))
