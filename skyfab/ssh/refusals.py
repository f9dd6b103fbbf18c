"""The errors for a login that failed, with the next command to type, in the same words for each transport."""

from __future__ import annotations

import getpass
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from skyfab._util.suggest import did_you_mean
from skyfab.errors import AuthenticationRefused, HostKeyRefused, Unreachable
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.inventory.ssh_config import CONFIG, known_settings, loop_of
from skyfab.ssh import keys
from skyfab.ssh.logins import ServerBusy
from skyfab.ui.prompt import TERMINAL

_TYPED = ("password", "keyboard-interactive")


def by_hand(host: Host, command: str = "", jumps: Sequence[Host] = ()) -> str:
    """The ssh command that a user would type to reach the host."""
    config = os.environ.get(CONFIG)
    words = ["ssh", *(["-F", config] if config else [])]
    words += ["-p", str(host.port)] if host.port else []
    words += ["-i", host.identity] if host.identity else []
    if jumps:
        words += ["-J", ",".join(jump.login for jump in jumps)]
    place = host.destination if host.user is None else f"{host.user}@{host.destination}"
    return shlex.join([*words, place, *command.split()])


def refused(hops: Sequence[Host], at: Host, methods: Sequence[str], *, typed: str) -> AuthenticationRefused:
    """The error for a login that the server `at` rejected, on the path `hops` to a host, which is the last one.

    `methods` are those that it takes, empty if unknown; `typed` is `Prompts.outcome`.
    """
    target = hops[-1]
    before = hops[: hops.index(at)] if at in hops else ()
    user = at.user or known_settings(at).get("user", [getpass.getuser()])[0]
    who = f"{user}@{at.destination}"
    by = "" if at is target else f"its jump host {at.name} refused the login: "
    takes = f" (it accepts {', '.join(methods)})" if methods else ""
    by_typing = [method for method in methods if method in _TYPED]
    tried = keys.tried(at)
    files = [key for key in tried if Path(key).is_file()]
    hint = f"try: {by_hand(at, jumps=before)}"
    if typed:
        text = f"{typed} for {who}{takes}"
    elif by_typing and "publickey" not in methods:
        text = f"{who} accepts only {' or '.join(by_typing)}, and there is no terminal for a prompt"
        hint = f"run the same command in a terminal, or {hint}"
    elif not TERMINAL.is_attended() and (key := keys.locked(at, files)):
        text = f"the key {key} has a passphrase, no ssh-agent holds it, and there is no terminal for a prompt"
        hint = f"ssh-add {shlex.quote(key)}"
    else:
        named = f"tried {', '.join(tried)}" if tried else "no key to try"
        more = "; it accepts passwords too, but there is no terminal for a prompt" if by_typing else ""
        text = f"no key was accepted for {who}{takes}: {named}{more}"
        hint = keys.copy_command(at, before, tried, files)
    return AuthenticationRefused(f"{by}{text}", host=target.name, hint=hint)


def unknown_jump(name: str, target: Host, inventory: Inventory) -> Unreachable:
    """For the name of a jump host that nothing knows."""
    near = did_you_mean(name, [known for known in inventory.hosts if known != target.name])
    return Unreachable(
        f"its jump host {name} does not resolve, and neither the inventory nor ssh_config has it",
        host=target.name,
        hint=f"{near} (jump = … in the inventory)" if near else f"try: {shlex.join(['ssh', name])}",
    )


def no_answer(said: str, hops: Sequence[Host], inventory: Inventory, *, is_nameless: bool) -> Unreachable:
    """For a host that cannot be reached; with `is_nameless`, no address was found for its name."""
    host, jumps = hops[-1], hops[:-1]
    hint = f"is it up? try: {by_hand(host, jumps=jumps)}"
    if is_nameless and inventory.source is None:
        hint = f"no inventory is loaded: set SKYFAB_INVENTORY, or try: {by_hand(host, jumps=jumps)}"
    elif is_nameless:
        hint = f"check its address in {inventory.source}, or try: {by_hand(host, jumps=jumps)}"
    if host.jump is None and (loop := loop_of(host.destination, {})):
        hint = f"its jump hosts in ssh_config form a loop: {' → '.join(loop)}; remove one of the ProxyJump lines"
    return Unreachable(said, host=host.name, hint=hint)


def busy(said: str, hops: Sequence[Host]) -> ServerBusy:
    """For a server that closed the connection before the login."""
    host, jumps = hops[-1], hops[:-1]
    return ServerBusy(
        f"its SSH server, or a jump host's, closed the connection before the login: {said}",
        host=host.name,
        hint=f"is it up? a busy server rejects logins (MaxStartups); try: {by_hand(host, jumps=jumps)}",
    )


def changed_key(target: Host, at: Host) -> HostKeyRefused:
    """For a host key that differs from the known one, of the host or of the jump host `at` on the way to it."""
    if at.host_key is not None:
        hint = f"if that is expected, change host_key under [hosts.{at.name}] in the inventory"
    else:
        hint = f"if that is expected: skyfab trust --hosts={at.name} --replace"
    return HostKeyRefused(
        f"{_whose(target, at)} is not the one on record: the host was reinstalled, or this is another machine",
        host=target.name,
        hint=hint,
    )


def revoked_key(target: Host, at: Host) -> HostKeyRefused:
    """For a key that known_hosts marks with ``@revoked``."""
    return HostKeyRefused(
        f"{_whose(target, at)} is revoked in known_hosts",
        host=target.name,
        hint="anyone with that key can impersonate it: create a new one on the host",
    )


def unknown_key(target: Host, at: Host) -> HostKeyRefused:
    """For a host key that is on no record."""
    error = HostKeyRefused(f"{_whose(target, at)} is unknown", host=target.name, hint=f"skyfab trust --hosts={at.name}")
    error.is_unknown = True
    return error


def _whose(target: Host, at: Host) -> str:
    return "its host key" if at is target else f"the host key of its jump host {at.name}"
