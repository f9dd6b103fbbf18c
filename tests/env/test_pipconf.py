"""pip's configuration as variables of uv: which files are read, and what each setting means."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from skyfab.env.pipconf import NO_INDEX, config_files, main, pip_settings, uv_environment


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment whose files are all below one folder, but those of the whole machine."""
    return {
        "HOME": str(tmp_path / "home"),
        "XDG_CONFIG_DIRS": str(tmp_path / "etc"),
        "VIRTUAL_ENV": str(tmp_path / "venv"),
    }


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def said(**pip: str) -> dict[str, str]:
    """What is said with PIP_* alone."""
    return uv_environment({"PIP_CONFIG_FILE": os.devnull, **{f"PIP_{name.upper()}": v for name, v in pip.items()}})


@pytest.mark.skipif(sys.platform == "darwin", reason="it has other folders")
def test_later_files_override_earlier_ones(place: dict[str, str], tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.conf"
    files = [*config_files(place)]
    assert files == [
        tmp_path / "etc" / "pip" / "pip.conf",
        Path("/etc/pip.conf"),
        tmp_path / "home" / ".pip" / "pip.conf",
        tmp_path / "home" / ".config" / "pip" / "pip.conf",
        tmp_path / "venv" / "pip.conf",
    ]
    assert [*config_files({**place, "PIP_CONFIG_FILE": str(chosen)})] == [*files, chosen], "it does not exist"
    chosen.touch()
    assert [*config_files({**place, "PIP_CONFIG_FILE": str(chosen)})] == [*files[:2], files[4], chosen]
    assert [*config_files({**place, "PIP_CONFIG_FILE": os.devnull})] == []
    other = {**place, "XDG_CONFIG_HOME": "/x", "XDG_CONFIG_DIRS": f"/a{os.pathsep}/b"}
    assert [str(path) for path in config_files(other)][:5:2] == ["/a/pip/pip.conf", "/etc/pip.conf", "/x/pip/pip.conf"]
    bare = [str(path) for path in config_files({})]
    assert bare[0] == "/etc/xdg/pip/pip.conf" and bare[-1] == f"{sys.prefix}/pip.conf"
    assert bare[2] == os.path.expanduser("~/.pip/pip.conf")  # noqa: PTH111


def test_sections_and_variables(place: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "etc" / "pip" / "pip.conf", "[global]\nindex-url = machine\ntimeout = 5\ncert = c\n")
    write(
        tmp_path / "venv" / "pip.conf",
        "[install]\nINDEX_URL = venv\n[global]\n--index-url = lost\ncert =\n[other]\nx = 1\n",
    )
    found = pip_settings({**place, "PIP_TIMEOUT": "7", "PIP_CERT": "", "PIPX": "1", "NAME": "2"})
    assert {name: found.get(name) for name in ("index-url", "timeout", "cert", "x")} == {
        "index-url": "venv",
        "timeout": "7",
        "cert": None,
        "x": None,
    }


def test_indexes(tmp_path: Path) -> None:
    assert said(index_url="https://a.example/simple") == {"UV_DEFAULT_INDEX": "https://a.example/simple"}
    assert said(extra_index_url="https://b.example\n https://c.example") == {
        "UV_INDEX": "https://b.example https://c.example",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    (tmp_path / "my wheels, all").mkdir()
    folder = f"{tmp_path}/my%20wheels%2C%20all"
    links = said(find_links=f"https://d.example file://{folder} {tmp_path} {tmp_path}/missing")
    assert links == {"UV_FIND_LINKS": f"https://d.example,file://{folder},{tmp_path.as_uri()}"}
    assert said(index_url=str(tmp_path)) == {"UV_DEFAULT_INDEX": tmp_path.as_uri()}
    for word, is_set in (("1", True), ("Yes", True), ("0", False), ("false", False)):
        found = said(index_url="https://a.example", extra_index_url="https://b.example", no_index=word)
        assert (found == {"UV_DEFAULT_INDEX": NO_INDEX}) is is_set


def test_other_settings(tmp_path: Path) -> None:
    assert said(timeout="2.5") == {"UV_HTTP_TIMEOUT": "2"}
    assert said(default_timeout="9") == {"UV_HTTP_TIMEOUT": "9"}
    assert said(timeout="0.5") == said(timeout="soon") == {}
    assert said(trusted_host="a.example  b.example:8080") == {"UV_INSECURE_HOST": "a.example b.example:8080"}
    assert said(cert="/c.pem", client_cert="/k.pem") == {"SSL_CERT_FILE": "/c.pem", "SSL_CLIENT_CERT": "/k.pem"}
    assert said(cert=str(tmp_path)) == {"SSL_CERT_DIR": str(tmp_path)}
    assert said(proxy="http://p:1") == {"HTTPS_PROXY": "http://p:1", "HTTP_PROXY": "http://p:1"}


@pytest.mark.parametrize(
    ("pip", "own"),
    [
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_INDEX_URL", "UV_INDEX_URL"),
        ("PIP_TIMEOUT", "UV_HTTP_TIMEOUT"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ],
)
def test_what_is_said_to_uv_itself_counts(pip: str, own: str) -> None:
    environ = {"PIP_CONFIG_FILE": os.devnull, pip: "5"}
    assert uv_environment(environ) != {}
    assert uv_environment({**environ, own: "6"}) == {}
    assert uv_environment({**environ, own: ""}) != {}, "empty is not set"


def test_a_shell_can_read_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a b")
    main()
    assert capsys.readouterr().out == "export UV_INSECURE_HOST='a b'\n"
