"""Translates pip's configuration (pip.conf, PIP_*) to environment variables for uv.

uv reads neither, and in a lab with a mirror they are the only places that name the one reachable index. This file uses
only the standard library and nothing of skyfab: `./inv` runs it by its path before anything is installed. To use uv by
hand: `eval "$(python3 -I skyfab/env/pipconf.py)"`.
"""

from __future__ import annotations

import configparser
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

NO_INDEX = "file:///nonexistent"
"""An index without packages: uv has no variable for --no-index, and treats a missing folder as an empty index."""

_SPOKEN_FOR = {
    "UV_DEFAULT_INDEX": ("UV_INDEX_URL",),
    "UV_INDEX": ("UV_EXTRA_INDEX_URL",),
    "HTTPS_PROXY": ("https_proxy", "ALL_PROXY", "all_proxy"),
    "HTTP_PROXY": ("http_proxy", "ALL_PROXY", "all_proxy"),
}
"""Other names of a variable: if one of them is set, the user has already made the choice."""


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environ` so that uv uses the same indexes as pip.

    Variables of uv that `environ` already has are not changed. Raises ValueError for a pip.conf that cannot be parsed.

    >>> uv_environment({"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "https://mirror.example/simple"})
    {'UV_DEFAULT_INDEX': 'https://mirror.example/simple'}
    """
    pip = pip_settings(environ)
    extra = [_location(entry) for entry in pip.get("extra-index-url", "").split()]
    links = [_location(entry) for entry in pip.get("find-links", "").split()]
    cert, proxy = pip.get("cert", ""), pip.get("proxy", "")
    seconds = (pip.get("timeout") or pip.get("default-timeout", "")).partition(".")[0]  # uv accepts no fractions
    spoken = {
        "UV_DEFAULT_INDEX": _location(pip.get("index-url", "")),
        "UV_INDEX": " ".join(extra),
        # pip compares all its indexes; uv stops at the first one that has a package, which in a partial mirror is often
        # one without a wheel for this Python.
        "UV_INDEX_STRATEGY": "unsafe-best-match" if extra else "",
        "UV_FIND_LINKS": ",".join(link.replace(",", "%2C") for link in links if _readable(link)),
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "UV_HTTP_TIMEOUT": seconds if seconds.isdecimal() and int(seconds) else "",
        "SSL_CERT_DIR" if os.path.isdir(cert) else "SSL_CERT_FILE": cert,  # noqa: PTH112 - Path("") is a folder
        "SSL_CLIENT_CERT": pip.get("client-cert", ""),
        "HTTPS_PROXY": proxy,
        "HTTP_PROXY": proxy,
    }
    if pip.get("no-index", "").lower() in {"1", "true", "yes", "on", "y", "t"}:
        spoken |= {"UV_DEFAULT_INDEX": NO_INDEX, "UV_INDEX": "", "UV_INDEX_STRATEGY": ""}
    return {
        name: value
        for name, value in spoken.items()
        if value and not any(environ.get(other) for other in (name, *_SPOKEN_FOR.get(name, ())))
    }


def pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that `pip install` would use, keyed as in pip.conf: [global], then [install], then PIP_* variables.

    As in pip, an empty value counts as not set.
    """
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = _key  # type: ignore[assignment, method-assign]  # typeshed has it as a plain method
    for path in config_files(environ):
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read pip's configuration {path}: {error}") from error
    settings: dict[str, str] = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            settings |= {key: value for key, value in parser.items(section) if value}
    prefix = "PIP_"
    return settings | {_key(name[len(prefix) :]): v for name, v in environ.items() if name.startswith(prefix) and v}


def config_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """The files that pip would read, whether they exist or not; later files override earlier ones."""
    chosen = environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:
        return
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises without a home folder
    yield from _machine_files(environ)
    if not (chosen and Path(chosen).exists()):
        yield home / ".pip" / "pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
        if sys.platform == "darwin":
            yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield Path(environ.get("VIRTUAL_ENV") or sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def _machine_files(environ: Mapping[str, str]) -> Iterator[Path]:
    if sys.platform == "darwin":
        yield Path("/Library/Application Support/pip/pip.conf")
    else:
        for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
            yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")


def _key(name: str) -> str:
    """Normalizes a key: `INDEX_URL`, `index_url` and `--index-url` are the same to pip."""
    return name.lower().replace("_", "-").removeprefix("--")


def _location(entry: str) -> str:
    """A URL unchanged; a folder as a file URL, which contains no spaces whatever the folder's name."""
    if not entry or "://" in entry:
        return entry
    return Path(os.path.abspath(os.path.expanduser(entry))).as_uri()  # noqa: PTH100, PTH111 - keeps symlinks, never raises


def _readable(link: str) -> bool:
    """False for a local folder that does not exist: pip warns about it, uv refuses to start."""
    url = urlsplit(link)
    return url.scheme != "file" or Path(url2pathname(url.path)).is_dir()


def main() -> None:
    """Prints the translation of this process's environment as lines for a POSIX shell."""
    for name, value in uv_environment(os.environ).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
