"""`Vagrant`: the boxes of a Vagrantfile as hosts, with host keys that are recorded for each box."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from skyfab._util.reaper import Reaper
from skyfab._util.scripts import read
from skyfab.errors import HostKeyRefused, HostUnfit, Unreachable, UsageError
from skyfab.inventory import ssh_config
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.providers.base import LOG, Provider, Tell
from skyfab.providers.engine import last_words, run

_KEEP: Final = read("providers/vagrant.sh")
_KEY_FILE: Final = "skyfab_host_key"
"""Beside the id that Vagrant keeps of a box: that id, and the box's host key when it was first seen."""
_KEY_KINDS: Final = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa")
_SCAN: Final = 10
"""Seconds for a box to send its host key."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box as ``vagrant status`` lists it."""

    name: str
    provider: str
    state: str


@dataclass(eq=False)
class Vagrant(Provider):
    """The boxes of a Vagrantfile: ``Compute(provider=Vagrant("vagrant"))``, or ``with Vagrant(…) as inventory``.

    `folder` contains the Vagrantfile. With `up`, boxes that are not running are started, and halted again at the end,
    even if this program is killed; without it, only running boxes are used.
    """

    folder: str | os.PathLike[str] = "."
    up: bool = field(default=False, kw_only=True)
    _reaper: Reaper | None = field(default=None, init=False, repr=False)

    def start(self, tell: Tell = LOG.info) -> Inventory:
        """Brings boxes up if asked; see `Provider.start`, also for `tell`. Raises UsageError and HostError."""
        if self._reaper is not None:
            raise UsageError("these boxes are already up", hint="create a Vagrant for each pool")
        try:
            return self._inventory(self._program(), tell)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Halts the boxes that `start` has brought up."""
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            reaper.close()

    def _inventory(self, program: str, tell: Tell) -> Inventory:
        boxes = self._status(program)
        down = [box.name for box in boxes if box.state != "running"]
        if down and self.up:
            tell(f"vagrant up {' '.join(down)}")
            self._bring_up(program, down)
            boxes = self._status(program)
        running = {box.name: box for box in boxes if box.state == "running"}
        if not running:
            hint = f"(cd {shlex.quote(os.fspath(self.folder))} && vagrant up), or sky.Vagrant(…, up=True)"
            states = ", ".join(f"{box.name} ({box.state})" for box in boxes)
            raise UsageError(f"no box is running: {states or 'vagrant status lists none'}", hint=hint)
        hosts = parse(self._run(program, "ssh-config", *running), running)
        return Inventory(hosts={host.name: self._with_key(host, running[host.name]) for host in hosts})

    def _program(self) -> str:
        found = shutil.which("vagrant")
        if found is None:
            raise UsageError("vagrant is not installed", hint="install the package vagrant, and VirtualBox or libvirt")
        if not Path(self.folder, "Vagrantfile").is_file():
            raise UsageError(f"{os.fspath(self.folder)} has no Vagrantfile", hint="name the folder that has one")
        return found

    def _run(self, program: str, *words: str) -> str:
        done = run(program, *words, cwd=self.folder)
        if done.returncode:
            raise UsageError(f"vagrant {words[0]} failed: {last_words(done.stderr or done.stdout)}")
        return done.stdout

    def _status(self, program: str) -> list[Box]:
        found: dict[str, dict[str, str]] = {}
        for line in self._run(program, "status", "--machine-readable").splitlines():
            _, name, kind, data = [*line.split(",", 3), "", "", "", ""][:4]
            if name:
                found.setdefault(name, {})[kind] = data
        return [
            Box(name, one.get("provider-name", ""), one["state"].strip())
            for name, one in found.items()
            if "state" in one
        ]

    def _bring_up(self, program: str, names: Sequence[str]) -> None:
        with tempfile.NamedTemporaryFile(prefix="skyfab-vagrant-") as log:
            self._reaper = Reaper(_KEEP, program, log.name, *names, cwd=self.folder)
            code = self._reaper.stdout.readline().strip()
            if code != b"0":
                said = Path(log.name).read_text(errors="replace")
                raise HostUnfit(f"vagrant up {' '.join(names)} failed: {last_words(said)}", hint="try: vagrant up")

    def _with_key(self, host: Host, box: Box) -> Host:
        """The host with its key: the one on record for this box, or the one that it sends now, which is recorded.

        The connection for that ends on this machine. A box that was destroyed and recreated has another id.
        """
        state = Path(
            self.folder, os.environ.get("VAGRANT_DOTFILE_PATH", ".vagrant"), "machines", box.name, box.provider
        )
        try:
            number = (state / "id").read_text().strip()
        except OSError:
            raise UsageError(f"vagrant has no id for the box {box.name} in {state}", hint="run vagrant up") from None
        record = state / _KEY_FILE
        known, _, key = record.read_text().strip().partition(" ") if record.is_file() else ("", "", "")
        if known != number:
            key = _scan(host)
            record.write_text(f"{number} {key}\n")
        try:
            return replace(host, host_key=key)
        except UsageError as error:
            raise HostKeyRefused(f"{record}: {error.message}", host=host.name, hint=f"rm {record}") from None


def parse(text: str, names: Iterable[str]) -> list[Host]:
    """The hosts of these names in what ``vagrant ssh-config`` prints, as ssh understands it.

    Of several keys the first is taken that is there. `UserKnownHostsFile` and `StrictHostKeyChecking` do not count.
    """
    with tempfile.NamedTemporaryFile("w", prefix="skyfab-vagrant-") as file:
        file.write(text)
        file.flush()
        return [_host(name, ssh_config.settings(Host(name=name), file.name)) for name in names]


def _host(name: str, settings: ssh_config.Settings) -> Host:
    if settings.get("proxycommand", ["none"]) != ["none"]:
        raise UsageError(
            f"the box {name} is reached through a ProxyCommand",
            hint="put the output of vagrant ssh-config into ~/.ssh/config, and name the box: sky.Compute(…)",
        )
    if missing := {"identityfile", "hostname", "port", "user"} - settings.keys():
        lacks = ", ".join(sorted(missing))
        raise UsageError(f"ssh -G does not print {lacks} of the box {name}", hint="is ssh installed?")
    keys = settings["identityfile"]
    return Host(
        name=name,
        address=settings["hostname"][0],
        port=int(settings["port"][0]),
        user=settings["user"][0],
        identity=next((key for key in keys if Path(key).exists()), keys[0]),
        jump="none",
    )


def _scan(host: Host) -> str:
    said = run("ssh-keyscan", "-T", str(_SCAN), "-p", str(host.port or 22), "--", host.destination).stdout
    found = [line.split()[1:3] for line in said.splitlines() if len(line.split()) == 3 and not line.startswith("#")]
    keys = {kind: f"{kind} {key}" for kind, key in found}
    for kind in _KEY_KINDS:
        if kind in keys:
            return keys[kind]
    raise Unreachable(f"no host key from {host.login}", host=host.name, hint="is it up? try: vagrant ssh")
