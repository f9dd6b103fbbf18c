"""`Host`: one machine, how to connect to it and how it may be used. Every field is validated."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from skyfab._util.schema import name_of
from skyfab.errors import UsageError

# Allowlists, not blocklists: these values end up on ssh's command line and in its ProxyCommand.
NAME = re.compile(r"\w[\w.+-]*")
MOST_SLOTS = 4096
_USER = r"\w([\w.+\\@-]*[\w-])?"
_PLACE = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>\w[\w.+-]*))(?::(?P<port>[0-9]{1,5}))?")
_IPV6 = re.compile(r"[0-9a-fA-F:.]+(%\w[\w.-]*)?")
_FOLDER = "/.*|~(/.*)?"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LETTERS = "use letters, digits, '.', '_', '+' and '-'"


class Address(NamedTuple):
    """``user@host:port``; user and port are optional."""

    user: str | None
    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """Parses an address as ssh's command line takes it; None if it is not a valid one."""
        user, at, place = text.rpartition("@")
        if at and not re.fullmatch(_USER, user):
            return None
        if _is_ipv6(place):
            return cls(user or None, place, None)
        match = _PLACE.fullmatch(place)
        if match is None or (match["ipv6"] and not _is_ipv6(match["ipv6"])):
            return None
        port = None if match["port"] is None else int(match["port"])
        if port is not None and not 1 <= port <= 65535:
            return None
        return cls(user or None, match["ipv6"] or match["host"], port)


class Env(dict[str, str]):
    """Environment variables. Their values may be secrets, so `repr` hides them."""

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name!r}: [secret]" for name in self) + "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine. The constructor checks every field, so that any Host is safe to pass to ssh.

    How to reach it: `name`, `address`, `port`, `user`; `identity`, the file of a private key; `jump`, jump hosts;
    `host_key`, if not that of known_hosts; `transport`: "openssh", "fabric", "local" or "auto"; `interface`, the
    network on which hosts connect to each other.

    How to use it: `python`, as for `Image`; `gpus`, the numbers of those to use; `slots`, the number of simultaneous
    solo calls; `cache`, skyfab's folder on the host; `workdir`, the working folder, as for `Compute`; `setup`, shell
    lines before Python; `container` or `apptainer`, in which everything runs; `env`, variables; `tags`, words that
    select it.

    Raises `UsageError` for an invalid value.

    >>> Host(name="node1", address="10.0.0.11", port=2222, user="ada").login
    'ada@10.0.0.11:2222'
    """

    name: str
    """The name that is shown; for a host that is not in the inventory, the word that selected it."""
    address: str | None = None
    """None: the name is used, and ssh_config may resolve it."""
    port: int | None = None
    """None: that of ssh_config, or 22."""
    user: str | None = None
    """None: that of ssh_config, or the user of this machine."""
    identity: str | None = None
    """The file of the private key; ``~`` is the home folder on this machine."""
    jump: str | None = None
    """Hosts of the inventory or ssh addresses, comma-separated; ``"none"``: direct, overriding ssh_config."""
    host_key: str | None = None
    """``"ssh-ed25519 AAAA…"``; None: that of known_hosts."""
    python: str = "auto"
    """The default for images on this host: ``"auto"``, ``"3.11"``, or the path of an interpreter on the host."""
    gpus: Literal["auto"] | tuple[int, ...] = "auto"
    """The numbers of the GPUs to use; ``()`` for none."""
    slots: int = 1
    """Number of solo calls that may run at the same time."""
    cache: str = "~/.cache/skyfab"
    """``~`` is the home folder on the host, and is expanded there."""
    workdir: str = "auto"
    """The working folder of functions: ``"auto"``, ``"temp"`` or a path on the host, as for `Compute`."""
    setup: str = ""
    """Shell lines that run on the host before Python, as in ``module load cuda``: workers have their variables."""
    container: str | None = None
    """A container of the host, which podman or docker runs: everything runs inside, also Python and the cache."""
    apptainer: str | None = None
    """The same for an image on the host, which apptainer runs: a path, or ``instance://NAME``."""
    transport: Literal["auto", "openssh", "fabric", "local"] = "auto"
    """How to connect: the ssh program, Fabric, or without SSH for this machine."""
    interface: str = "auto"
    """The network interface for traffic between hosts, as in ``"ib0"``: they connect at its address."""
    tags: tuple[str, ...] = ()
    """Words that select it, as names and groups do."""
    env: Mapping[str, str] = field(default_factory=Env, hash=False)
    """Environment variables of its workers."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.default is None:
                continue
            where = f"Host {self.name!r}: {item.name}"
            object.__setattr__(self, item.name, checked(item.name, value, where))
        if self.container and self.apptainer:
            raise UsageError(f"Host {self.name!r}: container and apptainer cannot be combined", hint="remove one")

    @property
    def inside(self) -> str:
        """What everything runs in, as messages call it: ``its container dev``; empty for the host itself."""
        if self.apptainer:
            return f"its image {self.apptainer}"
        return f"its container {self.container}" if self.container else ""

    @property
    def place(self) -> str:
        """Where it is, for tables."""
        where = "this machine" if self.transport == "local" else self.login
        return f"{where} ({self.inside.removeprefix('its ')})" if self.inside else where

    @property
    def is_here(self) -> bool:
        """Whether it is this machine itself, with its files and this program's Python."""
        return self.transport == "local" and not self.inside

    def in_container(self, word: str) -> Host:
        """The same host with everything in the container `word`, or image if it is a path. Raises UsageError."""
        is_image = "/" in word or word.endswith(".sif")
        return replace(self, container=None if is_image else word, apptainer=word if is_image else None)

    @property
    def destination(self) -> str:
        """The address that ssh connects to, also for messages."""
        return self.address or self.name

    @property
    def login(self) -> str:
        """``user@address:port``, as ssh's ``-J`` takes it, without parts that are left to ssh_config."""
        place = f"[{self.destination}]" if _is_ipv6(self.destination) else self.destination
        return (f"{self.user}@" if self.user else "") + place + (f":{self.port}" if self.port else "")

    @classmethod
    def ad_hoc(cls, word: str) -> Host | None:
        """A host for `word`, an ssh address or ssh_config alias not in the inventory; None if it is not a valid one."""
        name = word.removeprefix("ssh://")
        address = Address.parse(name)
        if address is None:
            return None
        place = None if address.host == name else address.host
        return cls(name=name, address=place, port=address.port, user=address.user)


def expanded(text: str) -> Path:
    """A path with ``~`` expanded, if there is a home folder: a container's user may have none."""
    with suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)


def _is_ipv6(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.IPv6Address(text)
        return _IPV6.fullmatch(text) is not None
    return False


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be a string, not {name_of(value)}", hint="write it in quotes")
    if not value.strip():
        raise UsageError("must not be empty", hint="remove the key, or give it a value")
    if value.startswith("-"):
        raise UsageError(f"must not start with '-': {value!r}", hint="ssh would read it as an option")
    if not value.isprintable():
        raise UsageError("contains control characters", hint="check for a newline or tab")
    return value


def _matching(pattern: str, problem: str, hint: str) -> Callable[[object], str]:
    """A check for a string that matches a pattern."""

    def check(value: object) -> str:
        text = _text(value)
        if not re.fullmatch(pattern, text):
            raise UsageError(f"{problem}: {text!r}", hint=hint)
        return text

    return check


def _integer(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "write it without quotes" if isinstance(value, str) else "write a whole number"
        raise UsageError(f"must be an integer, not {name_of(value)}", hint=hint)
    return value


def _items(value: object, example: str) -> Iterable[object]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"must be an array, not {name_of(value)}", hint=f"for instance {example}")
    return value


def _name(value: object) -> str:
    text = _text(value)
    if Address.parse(text) is None:
        raise UsageError(f"not a valid host name: {text!r}", hint=_LETTERS)
    return text


def _address(value: object) -> str:
    text = _text(value)
    address = Address.parse(text)
    if address is None:
        raise UsageError(f"not a host name or IP address: {text!r}", hint='for instance address = "10.0.0.11"')
    if address.user is not None:
        raise UsageError(f"contains a user name: {text!r}", hint=f'set user = "{address.user}" instead')
    if address.port is not None:
        raise UsageError(f"contains a port: {text!r}", hint=f"set port = {address.port} instead")
    return address.host


def _port(value: object) -> int:
    port = _integer(value)
    if not 1 <= port <= 65535:
        raise UsageError(f"must be from 1 to 65535, not {port}", hint="sshd listens on 22 by default")
    return port


def _identity(value: object) -> str:
    return str(expanded(_text(value)))


def _jump(value: object) -> str:
    hops = [hop.strip().removeprefix("ssh://") for hop in _text(value).split(",")]
    for hop in hops:
        if Address.parse(hop) is None:
            raise UsageError(
                f"not a valid jump host: {hop!r}",
                hint="a host of the inventory, an ssh_config alias, or user@address:port; several with commas",
            )
    return ",".join(hops)


def _host_key(value: object) -> str:
    algorithm, encoded = [*_text(value).split(), "", ""][:2]  # a comment may follow
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    kind = len(algorithm).to_bytes(4, "big") + algorithm.encode()  # of which the key itself says that it is
    if not blob.startswith(kind) or blob == kind:
        raise UsageError(
            "not a public host key",
            hint='type and base64, as in the host\'s /etc/ssh/ssh_host_ed25519_key.pub: "ssh-ed25519 AAAA…"',
        )
    return f"{algorithm} {encoded}"


def _gpus(value: object) -> Literal["auto"] | tuple[int, ...]:
    if value == "auto":
        return "auto"
    numbers = tuple(map(_integer, _items(value, 'gpus = [0, 1], or gpus = "auto"')))
    if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError("must be distinct numbers, 0 or more", hint="as nvidia-smi numbers them: gpus = [0, 1]")
    return numbers


def _slots(value: object) -> int:
    slots = _integer(value)
    if not 1 <= slots <= MOST_SLOTS:
        hint = "exclude a host from a selection with !name"
        raise UsageError(f"must be between 1 and {MOST_SLOTS:,}, not {slots}", hint=hint)
    return slots


def _setup(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"must be a string, not {name_of(value)}", hint="several lines go between three quotes")
    if "\0" in value:
        raise UsageError("contains a NUL character", hint="shells do not accept one")
    return value.strip()


def _tags(value: object) -> tuple[str, ...]:
    return tuple(map(_matching(NAME.pattern, "invalid tag", _LETTERS), _items(value, 'tags = ["a100"]')))


def _env(value: object) -> Env:
    if not isinstance(value, Mapping):
        raise UsageError(f"must be a table, not {name_of(value)}", hint='for instance env = { OMP_NUM_THREADS = "8" }')
    for name, text in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"invalid variable name: {name!r}", hint="use letters, digits and '_', and do not start with a digit"
            )
        if not isinstance(text, str):
            raise UsageError(f"{name} must be a string, not {name_of(text)}", hint="write the value in quotes")
        if "\0" in text:
            raise UsageError(f"{name} contains a NUL character", hint="environment variables do not accept one")
    return Env(value)


def checked(key: str, value: object, where: str) -> Any:
    """A value, checked as the `key` of a host. Raises UsageError with `where` in its message."""
    try:
        return CHECKS[key](value)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", hint=error.hint) from None


CHECKS: Mapping[str, Callable[[object], Any]] = {
    "name": _name,
    "address": _address,
    "port": _port,
    "user": _matching(_USER, "not a valid user name", _LETTERS),
    "identity": _identity,
    "jump": _jump,
    "host_key": _host_key,
    "python": _matching(
        r"auto|/.*|[0-9]+\.[0-9]+(\.[0-9]+)?",
        "not a Python version or path",
        '"auto", "3.11", or an absolute path on the host',
    ),
    "gpus": _gpus,
    "slots": _slots,
    "cache": _matching(_FOLDER, "must be an absolute path on the host", "start it with / or ~/"),
    "workdir": _matching(
        f"auto|temp|{_FOLDER}", "must be an absolute path on the host", 'start it with / or ~/; or "auto", or "temp"'
    ),
    "setup": _setup,
    "container": _matching(r"[A-Za-z0-9][\w.-]*", "not the name of a container", "as podman ps or docker ps prints it"),
    "apptainer": _text,
    "transport": _matching("auto|openssh|fabric|local", "unknown transport", "one of auto, openssh, fabric, local"),
    "interface": _matching(r"[^\s/]+", "not a network interface", '"auto", or a name that `ip link` prints'),
    "tags": _tags,
    "env": _env,
}
"""For each field of `Host`, the function that validates and normalizes a raw value. Raises `UsageError`."""

LOCAL = Host(name="local", transport="local")
"""This machine, without SSH."""
