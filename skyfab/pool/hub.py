"""What to fetch into the caches of hosts: models and data sets of the Hugging Face hub, and files of other servers.

Names, sizes and hashes come from a server and are checked here, so that the rest of skyfab can rely on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from skyfab._util import schema
from skyfab.errors import SkyfabError, UsageError
from skyfab.files.entries import is_inner

Page = Callable[[str, str, int], tuple[int, str, int, bytes]]
"""Requests a URL, with a token: status (0: not reached), cause of an error, size of the content, and the content.

The number is how many bytes of content to read at most.
"""
_LIST: Final = 64 << 20
"""Bytes of a list of files, at most."""
_HUB: Final = "https://huggingface.co"
_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_MOST_FILES: Final = 100_000
_LARGEST: Final = 1 << 44
"""Bytes of a file, at most."""
_HEX40: Final = re.compile("[0-9a-f]{40}")
_HEX64: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file: its source, size and hash."""

    path: str
    tag: str
    """The sha256, or for small files git's hash: the hub names their content so."""
    size: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files to fetch."""

    files: tuple[HubFile, ...]
    repository: str = ""
    """Its folder in the cache of the hub; empty for a file of another server."""
    commit: str = ""
    revision: str = ""
    shown: str = ""
    token: str = field(default="", repr=False)
    """The token that the server requires. Empty if it sends the files to everyone."""

    def matching(self, include: Sequence[str], exclude: Sequence[str]) -> Found:
        """Only the files that the patterns select. Raises UsageError if there are none."""
        kept = tuple(
            file
            for file in self.files
            if (not include or _matches(file.path, include)) and not _matches(file.path, exclude)
        )
        if not kept:
            some = ", ".join(file.path for file in self.files[:8])
            raise UsageError("no file matches", hint=f"available: {some or 'none'}")
        return replace(self, files=kept)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, f"{pattern}*" if pattern.endswith("/") else pattern) for pattern in patterns)


def find(source: str, page: Page) -> Found:
    """What `source` means, such as ``hf://org/model``. Raises UsageError and SkyfabError."""
    if source.startswith("hf://"):
        return _Repository.parse(source).listed(page)
    parts = urlsplit(source)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        hint = "expected hf://ORG/MODEL, hf://datasets/ORG/NAME or https://HOST/FILE#sha256=HEX"
        if re.fullmatch(rf"{_NAME}/{_NAME}(@\S+)?", source):
            hint = f"did you mean hf://{source}?"
        raise UsageError(f"cannot fetch {source}", hint=hint)
    if parts.username is not None:
        raise UsageError(f"cannot fetch from {parts.hostname}: the URL contains a user name or password")
    digest = parts.fragment.removeprefix("sha256=").lower()
    path = unquote(parts.path).rpartition("/")[2]
    url = parts._replace(fragment="").geturl()
    if not _HEX64.fullmatch(digest):
        what = f"{digest!r} is not a sha256 (64 hexadecimal digits)" if digest else "expected the sha256 of the file"
        raise UsageError(f"{url}: {what}", hint=f"write {url}#sha256=HEX, or for a model of the hub hf://ORG/MODEL")
    if not _is_path(path):
        raise UsageError(f"{url} does not end with a file name")
    status, why, size, _ = page(url, "", 0)
    if status != 200:
        raise _no_response(url, why) if status == 0 else SkyfabError(f"{url}: HTTP {status}")
    if not 0 <= size <= _LARGEST:
        raise SkyfabError(f"{url}: the server does not report a valid file size")
    return Found(files=(HubFile(path, digest, size, url),))


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or _HUB


def own_token() -> str:
    """The user's token, from the same places as the hub's library reads it; empty if there is none."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    path = Path(os.environ.get("HF_TOKEN_PATH") or f"{home}/token").expanduser()
    found = os.environ.get("HF_TOKEN", "").strip()
    if not found and path.is_file():
        found = path.read_text(errors="replace").strip()
    if not re.fullmatch(r"[!-~]*", found):  # an error of `urllib` would show it
        raise UsageError("invalid Hugging Face token: expected only letters, digits and punctuation")
    return found


def denied(name: str, status: int | str, token: str) -> UsageError:
    """The error for a file or repository that is gated or private."""
    page = f"{endpoint()}/{name}"
    if token:
        return UsageError(f"{name}: the hub refuses your token (HTTP {status})", hint=f"request access at {page}")
    hint = f"accept its terms at {page}, and set HF_TOKEN, or log in: hf auth login"
    return UsageError(f"{name} is gated: the hub sends it only with a token (HTTP {status})", hint=hint)


@dataclass(frozen=True, slots=True)
class _Repository:
    kind: str
    """``models`` or ``datasets``."""
    name: str
    revision: str

    @staticmethod
    def parse(source: str) -> _Repository:
        words, _, revision = source.removeprefix("hf://").strip("/").partition("@")
        kind, _, rest = words.partition("/")
        kind, name = (kind, rest) if kind in ("models", "datasets") and rest else ("models", words)
        if not re.fullmatch(f"{_NAME}(/{_NAME})?", name) or ".." in name or "--" in name:
            raise UsageError(
                f"invalid model name: {source}",
                hint="expected hf://ORG/MODEL or hf://datasets/ORG/NAME, optionally with @REVISION",
            )
        if "@" in source and not _is_path(revision):
            raise UsageError(f"invalid revision: {source}", hint="expected a branch, a tag or a commit")
        return _Repository(kind, name, revision or "main")

    @property
    def shown(self) -> str:
        return self.name if self.kind == "models" else f"{self.kind}/{self.name}"

    def listed(self, page: Page) -> Found:
        url = f"{endpoint()}/api/{self.kind}/{self.name}/revision/{quote(self.revision, safe='')}?blobs=true"
        token = own_token()
        status, why, _, body = page(url, "", _LIST)
        if status in (401, 403) and token:  # a host may ask instead of this machine, and needs no token for others
            status, why, _, body = page(url, token, _LIST)
        if status != 200:
            raise self._error(status, why, token)
        try:
            return self._parse(json.loads(body), token)
        except (ValueError, RecursionError) as error:
            text = str(error) if isinstance(error, schema.Invalid) else "not JSON, or too long"
            raise SkyfabError(f"{endpoint()}: invalid file list of {self.shown}: {text}") from None

    def _parse(self, listing: object, token: str) -> Found:
        found = schema.parse(_Listing, listing)
        if not _HEX40.fullmatch(found.sha):
            raise schema.Invalid("expected a commit", ("sha",))
        if len(found.siblings) > _MOST_FILES:
            raise schema.Invalid(f"more than {_MOST_FILES:,} files", ("siblings",))
        root = f"{endpoint()}/{self.shown}/resolve/{found.sha}"
        files = tuple(_file(one, place, root) for place, one in enumerate(found.siblings))
        paths = {file.path for file in files}
        if len(paths) < len(files) or any(_above(path) & paths for path in paths):
            raise schema.Invalid("two files with the same path", ("siblings",))
        is_open = not found.private and not found.gated
        repository = f"{self.kind}--{self.name.replace('/', '--')}"
        return Found(
            files=files,
            repository=repository,
            commit=found.sha,
            revision=self.revision,
            shown=self.shown,
            token="" if is_open else token,
        )

    def _error(self, status: int, why: str, token: str) -> SkyfabError:
        if status == 0:
            return _no_response(endpoint(), why)
        if why == "RevisionNotFound":
            return UsageError(f"{self.shown} has no revision {self.revision}")
        if why == "GatedRepo":
            return denied(self.shown, status, token)
        if status not in (401, 403, 404):
            return SkyfabError(f"{endpoint()}: HTTP {status} for the file list of {self.shown}")
        hint = "if it is private, your token has no access" if token else "if it is private, set HF_TOKEN"
        return UsageError(f"the hub has no {self.kind[:-1]} {self.name}", hint=hint)


@dataclass(frozen=True)
class _Lfs:
    sha256: str
    size: int


@dataclass(frozen=True)
class _Sibling:
    rfilename: str
    size: int | None = None
    blobId: str | None = None
    lfs: _Lfs | None = None


@dataclass(frozen=True)
class _Listing:
    sha: str
    siblings: list[_Sibling]
    private: bool = False
    gated: Any = False


def _file(one: _Sibling, place: int, root: str) -> HubFile:
    tag, size = (one.lfs.sha256, one.lfs.size) if one.lfs is not None else (one.blobId or "", one.size)
    if not _is_path(one.rfilename):
        raise schema.Invalid(f"invalid path: {one.rfilename[:200]!r}", ("siblings", place))
    if not (_HEX64 if one.lfs is not None else _HEX40).fullmatch(tag):
        raise schema.Invalid(f"no valid hash of {one.rfilename}", ("siblings", place))
    if size is None or not 0 <= size <= _LARGEST:
        raise schema.Invalid(f"invalid size of {one.rfilename}", ("siblings", place))
    return HubFile(one.rfilename, tag, size, f"{root}/{quote(one.rfilename)}")


def _is_path(path: str) -> bool:
    """Whether it is a printable path below a folder, whose meaning is the same on all file systems."""
    return path.isprintable() and is_inner(path.encode()) and all(len(part.encode()) < 256 for part in path.split("/"))


def _above(path: str) -> set[str]:
    """The folders of a path."""
    parts = path.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts))}


def _no_response(url: str, why: str) -> SkyfabError:
    hint = "check the network, HTTPS_PROXY and HF_ENDPOINT, on this machine or on a host"
    error = SkyfabError(f"cannot reach {url} from this machine or any host: {why}", hint=hint)
    error.exit_code = 3
    return error
