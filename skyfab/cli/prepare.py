"""`skyfab prepare`: builds an environment on hosts in advance, and optionally writes its lock file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import InventoryFile, Json, NamedHosts, Option, command
from skyfab.cli.report import print_json
from skyfab.cli.run_options import ImageOptions
from skyfab.errors import PoolError, SkyfabError, UsageError

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.env.lock import Lock
    from skyfab.inventory.host import Host
    from skyfab.inventory.inventory import Inventory
    from skyfab.ui.events import Event


@command
def prepare(
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    *,
    options: ImageOptions,
    upgrade: Annotated[bool, Option("resolve again, to the newest versions")] = False,
    lock_: Annotated[
        str | None, Option("write the resolved versions to this pylock.toml, for Image(lock=…)", "FILE")
    ] = None,
    json_: Json = False,
) -> None:
    """Build an environment in advance, on all hosts in parallel.

    Without packages, builds the environment of the project in the current folder, as skyfab run does; --with adds to
    it. Programs with the same Image(pip=…, pip_indexes=…, apt=…) find it ready.

        skyfab prepare --hosts=gpu
        skyfab prepare --pip=numpy,torch
        skyfab prepare --hosts=gpu --requirements=requirements.txt --lock=pylock.toml
        skyfab prepare --pip=torch --index=https://download.pytorch.org/whl/cu126=torch
    """
    from skyfab.cli.host_selection import selected

    found, chosen = selected(hosts, inventory, quiet=json_)
    image = _image(options, chosen)
    if lock_ is not None and not image.pip:
        raise UsageError("--lock needs packages", hint="name some: --pip=numpy")
    image = replace(image, excludes=("*",))  # no file of the caller's project is needed
    if upgrade:
        _look_for_newer(image, chosen, found)
    _build(image, chosen, found, as_json=json_)
    if lock_ is not None:
        _write_lock(Path(lock_), image, chosen, quiet=json_)


def _image(options: ImageOptions, hosts: Sequence[Host]) -> Image:
    """The image of the options, else of the project in the current folder, with the plugins that it names."""
    from skyfab.cli.run_environment import ProjectSettings, image_of, plugins_of

    script = Path.cwd() / "main.py"  # need not be there: its folder counts
    settings = ProjectSettings.of(script)
    image = image_of(script, options, settings, hosts, no_project=False)
    for plugin in () if options.name_packages else plugins_of(settings.plugins):
        for host in hosts:
            image = plugin.transform(image, host)
    return image


# ---- building


def _build(image: Image, hosts: Sequence[Host], inventory: Inventory, *, as_json: bool = False) -> None:
    """Builds the image's environment on the hosts, and prints a table with the outcome, or a list for programs.

    Raises the hosts' errors, after the table.
    """
    from skyfab.pool.compute import Compute
    from skyfab.ui.events import HostState

    began = time.monotonic()
    seconds: dict[str, float] = {}

    def watch(event: Event) -> None:
        if isinstance(event, HostState) and event.state in ("ready", "failed"):
            seconds.setdefault(event.host, time.monotonic() - began)

    pool = Compute(hosts, inventory=inventory, image=image)
    pool.events.subscribe(watch)
    failure: SkyfabError | None = None
    try:
        with pool:
            pass
    except SkyfabError as error:
        failure = error
    parts = failure.exceptions if isinstance(failure, PoolError) else [failure]
    errors = {one.host: one.message for one in parts if isinstance(one, SkyfabError)}
    if None not in errors:  # else it is not the error of a host
        _show(hosts, image, seconds, errors, as_json=as_json)
    if failure is not None:
        raise failure


# ---- the result


def _made(image: Image, hosts: Sequence[Host]) -> dict[str, tuple[Lock, str]]:
    """The lock of the image and the digest of its environment, by host, as the pool has used and cached them."""
    from skyfab.env import facts_cache
    from skyfab.env.facts import Target
    from skyfab.env.prepare import Preparation
    from skyfab.session.bootstrap import local_python

    plan = Preparation(image, hosts, local_python())
    facts = [(host, facts_cache.load(host)) for host in hosts if not plan.is_empty]
    known = [(host, said, Target.of(said, plan.python)) for host, said in facts if said is not None]
    for host, _, target in known:
        plan.meet(host, target)
    locks = [(host, plan.python_of(host, said), plan.known_lock(target)) for host, said, target in known]
    return {host.name: (lock, plan.digest(lock, python)) for host, python, lock in locks if lock is not None}


def _show(
    hosts: Sequence[Host],
    image: Image,
    seconds: Mapping[str, float],
    errors: Mapping[str | None, str],
    *,
    as_json: bool,
) -> None:
    from skyfab.ui.table import table

    found, rows, made = [], [], _made(image, hosts)
    for host in hosts:
        error = errors.get(host.name)
        lock, digest = made.get(host.name, (None, "")) if error is None else (None, "")
        spent = round(seconds.get(host.name, 0.0), 1)
        count = len(lock.wheels) if lock else None
        about = {"host": host.name, "environment": digest or None, "packages": count}
        found.append({**about, "seconds": spent, "error": error})
        cells = (digest[:12], str(count)) if digest else ("–", "–")
        rows.append((host.name, *cells, f"{spent:.1f}", error.partition("\n")[0] if error else "ready"))
    if as_json:
        print_json(found)
    else:
        table(("host", "environment", "packages", "seconds", "state"), rows, right=("packages", "seconds"))


def _write_lock(path: Path, image: Image, hosts: Sequence[Host], *, quiet: bool = False) -> None:
    """Writes the pylock.toml that the image resolves to. Raises UsageError if the hosts need different locks."""
    from skyfab._util import atomic

    groups: dict[str, list[str]] = {}
    made = _made(image, hosts)
    for host, (lock, _) in made.items():
        groups.setdefault(lock.text, []).append(host)
    if len(groups) != 1:
        raise UsageError(
            f"these hosts need different packages, one lock for each: {' | '.join(map(','.join, groups.values()))}",
            hint="skyfab prepare --hosts=… --lock=…",
        )
    (text,) = groups
    try:
        atomic.write(path, text, mode=0o644)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    if not quiet:
        wheels = made[groups[text][0]][0].wheels
        print(f"{path}: {len(wheels)} packages; use it with Image(lock={str(path)!r})")


# ---- newer versions


def _look_for_newer(image: Image, hosts: Sequence[Host], inventory: Inventory) -> None:
    """Resolves again for each kind of host; the pool then uses the new locks. The pool reports unreachable hosts."""
    from skyfab.env import facts_cache
    from skyfab.env.facts import Target
    from skyfab.env.lock import make_lock
    from skyfab.session.bootstrap import local_python, open_shell
    from skyfab.session.fanout import Raised, for_each_host
    from skyfab.ssh import transport_for

    def target(host: Host) -> Target:
        with open_shell(host, transport_for(host, inventory)) as shell:
            return Target.of(facts_cache.probe(host, shell), local_python())

    found = for_each_host(target, hosts)
    together = sorted({one for one in found if not isinstance(one, Raised)}, key=repr)
    for one in together:
        make_lock(image, one, together=together, upgrade=True)
