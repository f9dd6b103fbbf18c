"""Runs uv's resolver: finds versions of an image's packages that fit a host, each from the right index."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from skyfab._util import toml
from skyfab._util.versions import numbers
from skyfab.calls.image import Image, PipIndex, split_hashes
from skyfab.env import uv
from skyfab.env.facts import Target, cuda_for
from skyfab.env.pipconf import NO_INDEX
from skyfab.env.uv import UvFailed
from skyfab.errors import UsageError

_FORMAT = "3"
"""Incremented when stored locks must no longer be used."""
_PROJECT = "skyfab-image"
"""The name that uv has for an image."""


class LockError(UsageError):
    """The packages of an image cannot be resolved for a host: what was requested, and why it fails."""


def clean(text: str) -> str:
    """TOML text without user and password in the URLs of its strings; the user of an ssh URL remains."""
    return _STRING.sub(lambda found: _without_login(found[0]), text)


def _without_login(text: str) -> str:
    text = re.sub(r"(?<=ssh://)([^/\s:@]*):[^/\s]*@", r"\1@", text)
    return re.sub(r"(?<=://)(?<!ssh://)[^/\s]*@", "", text)


_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'")
"""A TOML string; each kind of quotation mark may occur inside the other."""


def text_of(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # reading it as a lock reports the error


TORCH = frozenset({"torch", "torchvision", "torchaudio"})
"""They come from one index: builds for different devices fail to import, which their versions do not show. torchvision
0.28.0 of PyPI, which is built for CUDA, requires torch 2.13.0, and uv accepts 2.13.0+cpu for that.
"""
_ROCM = ("7.2", "7.1", "7.0", "6.4", "6.3", "6.2.4", "6.2", "6.1", "6.0")
_SAID = re.compile(
    "UV_(DEFAULT_INDEX|INDEX|INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|INDEX_STRATEGY|TORCH_BACKEND|CONSTRAINT|OVERRIDE"
    "|EXCLUDE|EXCLUDE_NEWER|PRERELEASE|RESOLUTION|FORK_STRATEGY|NO_BINARY|CONFIG_FILE|NO_CONFIG)"
)
"""Variables that change uv's result."""
_ANY_BUILD = {"UV_TORCH_BACKEND": ""}
"""Resolves without PyTorch's own indexes."""
_FOR_GPUS = re.compile(r"nvidia-|cuda-|triton$|pytorch-triton")
"""Names of packages that a torch for GPUs requires."""
_WORD = r"(?<![\w-]){}(?![\w-])"  # the name of a package in what uv says
_UNFIT = r"(?<![\w.-]){}[=<>]\S+ (?:has no wheels with a matching [\w ]+\b|requires Python [^\s,]+)"
_HELD = rf"(?:all versions of )?(?<![\w.-])(?!{_PROJECT})[\w.-]+(?:[=<>]\S+)? depends? on {{}}[<=!~]\S*[^\s.,]"
"""uv's reasons against newer versions of a package, other than what the user has requested."""
_BUILDS = 8
"""Versions of torch that are tried from each index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What a uv.lock fixes for a target: see uvlock.py."""

    constraints: tuple[str, ...] = ()
    """``name==version``, or ``name @ URL`` for a package that comes from a git address, a folder or a URL."""
    indexes: tuple[PipIndex, ...] = ()
    """Indexes that the project names, each with the packages that come from it."""
    hashes: tuple[tuple[str, str], ...] = ()
    """The sha256 of each file by its name."""
    allowed: tuple[tuple[str, str], ...] = ()
    """``--hash`` options of requirements: the package, and what a file of it may have, ``sha256:…``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that a resolution depends on."""

    pip: tuple[str, ...]
    indexes: tuple[PipIndex, ...]
    target: Target
    torch: str = ""
    """The version that torch must have, because another host of the pool has it."""
    pins: Pins = Pins()

    @classmethod
    def of(cls, image: Image, target: Target, pins: Pins) -> Request:
        """`pins` are those of the image's uv.lock."""
        named = [(canonicalize_name(requirement(text).name), *split_hashes(text)) for text in image.pip]
        pins = replace(pins, allowed=tuple((name, one) for name, _, hashes in named for one in hashes))
        scopes: dict[str, str] = {}
        for index in image.pip_indexes:
            names = {canonicalize_name(name) for name in index.packages}
            if not names or names & scopes.keys():
                what = f"{min(names & scopes.keys())} has two indexes" if names else "no packages named"
                raise LockError(f"index {uv.redact(index.url)}: {what}", hint="name one index for each package")
            scopes |= dict.fromkeys(names, _place(index.url))
        for index in pins.indexes:
            scopes = dict.fromkeys(index.packages, index.url) | scopes
        if "torch" in scopes:
            scopes = dict.fromkeys(TORCH, scopes["torch"]) | scopes
        places = tuple(
            PipIndex(url, tuple(sorted(name for name in scopes if scopes[name] == url)))
            for url in sorted({*scopes.values()})
        )
        pip = tuple(text for _, text, _ in named)
        return cls(pip=pip, indexes=places, target=target, pins=pins)

    @property
    def names(self) -> set[str]:
        """The packages that are requested by name."""
        return {canonicalize_name(requirement(text).name) for text in self.pip}

    @property
    def scoped(self) -> set[str]:
        """The packages that have their own index."""
        return {name for index in self.indexes for name in index.packages}

    def key(self) -> str:
        """A hash of the request; passwords are not part of it."""
        environ = uv.environment()
        said = {name: clean(value) for name, value in environ.items() if _SAID.fullmatch(name)}
        scopes = [[uv.bare(index.url), *index.packages] for index in self.indexes]
        target, pip = self.target, [clean(text) for text in self.pip]
        parts = [_FORMAT, pip, scopes, uv.platform_of(target), target.python, target.driver, target.rocm, self.torch]
        pins = self.pins
        parts += [pins.constraints, pins.hashes, *pins.allowed, *map(_stamp, (*pip, *pins.constraints))]
        return uv.sum_of(json.dumps([*parts, uv.version(), sorted(said.items()), _files(environ)]))


class Resolver:
    """Resolves one request with uv."""

    def __init__(self, request: Request, *, refresh: bool) -> None:
        self.request = request
        self.target = request.target
        self.environ = uv.environment()
        self.refresh = refresh
        self._again: partial[str]
        """Repeats the last resolution."""

    def run(self) -> str:
        """Returns the pylock.toml. Raises LockError with uv's reason."""
        try:
            text = self._torch()
            return text + self._older(text)
        except UvFailed as failed:
            request, why = self.request, str(failed).replace(_PROJECT, "your image")
            names = [canonicalize_name(requirement(text).name) for text in request.pip]
            blamed = [text for name, text in zip(names, request.pip, strict=True) if re.search(_WORD.format(name), why)]
            wanted = uv.redact(", ".join(blamed or request.pip))
            where = f"Python {self.target.python} on {uv.described(self.target)}"
            if request.torch and re.search(r"\btorch\b", why):
                where += f", with torch {request.torch} as on other hosts"
            said = f"no version of {wanted} found for {where}"
            if failed.is_offline:
                said = f"cannot reach an index to find {wanted} for {where}"
            raise LockError(f"{said}\n{why}", hint=failed.hint) from None

    # torch: builds with and without GPU support are different files, from different indexes

    def _torch(self) -> str:
        """Resolves with a torch that fits the target, if torch is requested or required by another package."""
        chosen = self.environ.get("UV_TORCH_BACKEND", "")
        if "torch" in self.request.scoped or self.target.system == "Darwin" or chosen not in {"", "auto"}:
            return self._scoped()
        if not self.request.names & TORCH:
            text = self._scoped(env=_ANY_BUILD)
            if not _names(text) & TORCH:
                return text
        sources = self._sources()
        if not chosen and (text := self._with_torch_from(sources)):
            return text
        options, env = self._backend()
        try:
            return self._scoped(options=options, env=env)
        except UvFailed:
            if text := self._with_torch_from(sources, large=True):
                return text
            raise

    def _sources(self) -> list[str]:
        """Find-links, then the indexes, the default index last."""
        links = self.environ.get("UV_FIND_LINKS", "").split(",")
        has_default = self.environ.get("UV_DEFAULT_INDEX") or self.environ.get("UV_INDEX_URL")
        found = [*uv.configured(self.environ), *([] if has_default else uv.default_index())]
        return sorted((url for url in found if url != NO_INDEX), key=lambda url: url not in links)

    def _with_torch_from(self, sources: Sequence[str], *, large: bool = False) -> str:
        """Resolves with torch and its companions from one source alone; empty if none has a build for the target.

        In a joint query, a newer torch of the default index, which requires CUDA, would hide the others.
        """
        for source in sources:
            scope = PipIndex(source, tuple(sorted(TORCH - self.request.scoped)))
            alone = Resolver(replace(self.request, indexes=(*self.request.indexes, scope)), refresh=self.refresh)
            excluded: list[str] = []
            try:
                for _ in range(_BUILDS):
                    text = alone._scoped(constraints=excluded, env=_ANY_BUILD)
                    packages = {one["name"]: one.get("version", "") for one in toml.loads(text)["packages"]}
                    builds = [name for name in scope.packages if name in packages]
                    wrong = [name for name in builds if not self._suits(name, packages, large=large)]
                    if not wrong:
                        self._again = alone._again
                        return text
                    if "+" not in packages.get("torch", ""):
                        break  # an index such as PyPI: older versions are built for the same devices
                    excluded += [f"{name}!={packages[name]}" for name in wrong]
            except UvFailed as failed:
                if not re.search(r"\btorch", str(failed)):
                    raise  # another package is the reason: no other source of torch helps
        return ""

    def _suits(self, name: str, packages: Mapping[str, str], *, large: bool) -> bool:
        """Whether a build of torch or a companion runs on the target; `packages` are the versions of all packages.

        Without a label, as on PyPI, torch is built for CUDA. It also runs on hosts without a GPU, but needs 3 GB more.
        """
        label, target = packages[name].partition("+")[2], self.target
        cuda = re.fullmatch(r"cu(\d+)\d", label)
        if not label and name != "torch":
            return True
        if not label and target.is_plain:
            return large or not any(map(_FOR_GPUS.match, packages))
        if not label:
            needed = [int(found[1]) for one in packages if (found := re.match(r"nvidia-.*-cu(\d+)$", one))]
            return large and max(needed, default=99) <= (cuda_for(target.driver) or 0)
        if target.is_plain:
            return label.startswith("cpu")
        if re.match(r"\d", target.driver):
            return cuda is not None and int(cuda[1]) <= (cuda_for(target.driver) or 0)
        return label.startswith("rocm")

    def _backend(self) -> tuple[tuple[str, str], dict[str, str]]:
        """uv's option for the target's GPU, and variables that make uv see that GPU instead of this machine's."""
        driver, rocm = self.target.driver, self.target.rocm
        if re.match(r"\d", driver):
            return ("--torch-backend", "auto"), {"UV_CUDA_DRIVER_VERSION": driver, "UV_AMD_GPU_ARCHITECTURE": ""}
        found = numbers(rocm)
        fitting = [version for version in _ROCM if found and numbers(version) <= found]
        return ("--torch-backend", f"rocm{fitting[0]}" if fitting else "cpu"), {}

    # scopes: uv uses a package's own index only if the package is requested by name

    def _scoped(self, **how: Any) -> str:
        """Resolves with each package of a PipIndex from that index, even if only another package requires it.

        First requests all of them, to see which are needed; then requests only those.
        """
        hidden = self.request.scoped - self.request.names
        needed: set[str] = set()
        if hidden:
            try:
                needed = hidden & self._reached(self._compile(also=hidden, form="requirements.txt", **how))
            except UvFailed as failed:
                if failed.is_offline:
                    raise  # uv has tried it several times
                # else one that is not needed may not exist for this target
        while True:
            try:
                text = self._compile(also=needed, **how)
                more = (hidden - needed) & _names(text)
                if not more:
                    self._again = partial(self._compile, also=needed, **how)
                    return text
            except UvFailed as failed:
                more = {name for name in hidden - needed if re.search(_WORD.format(name), str(failed))}
                if failed.is_offline or not more:
                    raise
            needed |= more

    def _reached(self, pins: str) -> set[str]:
        """The packages that the requested ones lead to, from uv's ``# via`` comments."""
        parents: dict[str, set[str]] = {}
        current = ""
        for line in pins.splitlines():
            if found := re.match(r"([A-Za-z0-9._-]+)==", line):
                current = found[1]
            elif found := re.match(r"\s+#\s+(?:via\s+)?([A-Za-z0-9._-]+)", line):
                parents.setdefault(current, set()).add(found[1])
        reached = set(self.request.names)
        while more := {name for name, above in parents.items() if above & reached} - reached:
            reached |= more
        return reached

    def _older(self, text: str) -> str:
        """A comment that names the requested packages of which there is a newer version, and why it was not chosen.

        uv has the reason: it is asked for a newer version beside those of the other packages, from its cache alone.
        """
        chosen = {one["name"]: one.get("version", "") for one in toml.loads(text).get("packages", [])}
        how, found = self._again.keywords, []
        for name in sorted(self.request.names & chosen.keys()) if not self.request.pins.constraints else ():
            newer = f"{name}>{chosen[name].partition('+')[0]}"
            pins = [f"{other}=={version}" for other, version in chosen.items() if version and other != name]
            pins += how.get("constraints", ())
            try:
                self._again(also=how["also"] | {newer}, constraints=pins, offline=True)
            except UvFailed as failed:
                said = " ".join(str(failed).split())
                whys = re.findall(_UNFIT.format(name), said)[-1:] or re.findall(_HELD.format(name), said)[:1]
                found += [f"{name} {chosen[name]} ({why})" for why in whys]
        return f"# older than the newest version: {', '.join(found)}\n" if found else ""

    # uv pip compile

    def _compile(
        self,
        *,
        also: Set[str] = frozenset(),
        constraints: Sequence[str] = (),
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        form: str = "pylock.toml",
        offline: bool = False,
    ) -> str:
        request = self.request
        fixed = ["--format", form, "--no-header", "--python", sys.executable]
        fixed += ["--python-version", self.target.python, "--python-platform", uv.platform_of(self.target)]
        fixed += ["--generate-hashes"] if form == "pylock.toml" else ["--annotation-style", "split"]
        fixed += ["--offline"] if offline else ["--refresh"] if self.refresh else []
        limits = [*constraints, *request.pins.constraints, *([f"torch=={request.torch}"] if request.torch else [])]
        lines = ["[project]", f'name = "{_PROJECT}"', 'version = "0"']
        lines += [f"dependencies = {toml.dumps([*request.pip, *sorted(also)])}"]
        variables = {"UV_PYTHON_DOWNLOADS": "never", "MACOSX_DEPLOYMENT_TARGET": "", **(env or {})}
        for number, index in enumerate(request.indexes):
            lines += ["[[tool.uv.index]]", f'name = "skyfab-{number}"', f"url = {toml.dumps(uv.bare(index.url))}"]
            lines += ["explicit = true", *(['format = "flat"'] if self._is_flat(index.url) else [])]
            user, password = uv.userinfo(index.url) or ("", "")
            variables |= {f"UV_INDEX_SKYFAB_{number}_USERNAME": user, f"UV_INDEX_SKYFAB_{number}_PASSWORD": password}
        lines += ["[tool.uv.sources]"]
        for number, index in enumerate(request.indexes):
            lines += [f'{name} = {{ index = "skyfab-{number}" }}' for name in index.packages]
        with tempfile.TemporaryDirectory(prefix="skyfab-lock-") as folder:
            Path(folder, "pyproject.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
            if limits:  # the option overrides UV_CONSTRAINT
                Path(folder, "constraints.txt").write_text("\n".join(limits) + "\n", encoding="utf-8")
                files = ["constraints.txt", *self.environ.get("UV_CONSTRAINT", "").split()]
                fixed += [word for file in files for word in ("--constraints", file)]
            return uv.run_uv("pip", "compile", *fixed, *options, "pyproject.toml", env=variables, cwd=folder)

    def _is_flat(self, url: str) -> bool:
        """Whether it is a single page or folder with links to wheels, instead of one page for each package."""
        if uv.is_local(url):
            return not any(Path(unquote(urlsplit(url).path)).glob("*/index.html"))
        return urlsplit(url).path.endswith(".html") or url in self.environ.get("UV_FIND_LINKS", "").split(",")


def _stamp(text: str) -> str:
    """Changes with a requirement that is a file or folder of this machine."""
    url = urlsplit(requirement(text).url or "")
    return uv.stamp(Path(unquote(url.path))) if url.scheme == "file" else ""


def requirement(text: str) -> Requirement:
    try:
        return Requirement(split_hashes(text)[0])
    except InvalidRequirement:
        raise LockError(
            f"not a valid requirement: {uv.redact(text)!r}",
            hint='write a name with versions, such as "numpy>=2", or "name @ https://…/name-1.0-py3-none-any.whl"',
        ) from None


def _names(text: str) -> set[str]:
    return set(re.findall(r'^name = "([^"]+)"', text, re.MULTILINE))


def _place(url: str) -> str:
    """A PipIndex's URL; a folder as a file URL. Raises LockError if the folder does not exist."""
    if urlsplit(url).scheme in {"http", "https"}:
        return url
    folder = Path(unquote(urlsplit(url).path) if url.startswith("file:") else os.path.expanduser(url))  # noqa: PTH111 - never raises
    if not folder.is_dir():
        raise LockError(f"index {url}: no such folder", hint="give an http or https URL, or a folder with wheels")
    return folder.absolute().as_uri()


def _files(environ: Mapping[str, str]) -> list[str]:
    """Digests of files that change uv's result: its configuration, which may name indexes, and limits of versions."""
    config = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
    folders = (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep)
    system = [f"{folder}/uv/uv.toml" for folder in folders]
    files = [environ.get("UV_CONFIG_FILE", ""), f"{config}/uv/uv.toml", *system, "/etc/uv/uv.toml"]
    for name in ("UV_CONSTRAINT", "UV_OVERRIDE", "UV_EXCLUDE"):
        files += environ.get(name, "").split()
    return [uv.sum_of(text_of(file)) for file in files if file]
