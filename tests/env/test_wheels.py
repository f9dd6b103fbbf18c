"""Wheels: fetched once, checked, whole or not at all, with the credentials that belong to their host."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.tags import Tag
from stage.index import Index, isolate_uv, make_wheel, sha256
from stage.threads import at_once

from skyfab._util.cache import cache_folder
from skyfab.env import wheels
from skyfab.env.facts import Target
from skyfab.env.wheels import FetchError, Wheel, fetch
from skyfab.errors import UsageError


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine's settings and caches; no pause before another try."""
    isolate_uv(tmp_path, monkeypatch)
    monkeypatch.setattr(wheels, "_PAUSE", 0.0)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "index") as found:
        yield found


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Index]:
    with Index(tmp_path / "private", user="me", password="pass") as found:
        yield found


def served(index: Index, name: str = "app", *, secret: bool = False, folder: str = "files", **options: object) -> Wheel:
    """A wheel that an index has."""
    path = index.add(name, "1.0", **options)
    base = (index.secret_url if secret else index.url).removesuffix("/simple")
    return Wheel(
        package=name,
        version="1.0",
        filename=path.name,
        url=f"{base}/{folder}/{path.name}",
        sha256=sha256(path),
        size=path.stat().st_size,
    )


def kept() -> list[str]:
    """The files among the wheels of the cache."""
    return sorted(path.name for path in (cache_folder() / "wheels").rglob("*") if path.is_file())


def test_wheels_are_fetched_once(index: Index) -> None:
    """The same ones twice in a call, and in a second call; also where no size is known."""
    some = [served(index, f"app{number}") for number in range(9)]
    some += [replace(served(index, "sizeless"), size=None)]
    files = fetch([*some, *some])
    assert {sha: sha256(path) for sha, path in files.items()} == {wheel.sha256: wheel.sha256 for wheel in some}
    assert files[some[0].sha256] == cache_folder() / "wheels" / some[0].sha256 / some[0].filename
    assert fetch(some) == files
    assert len(index.requests) == 10
    assert fetch([]) == {}


def test_progress_is_reported_until_all_is_there(index: Index) -> None:
    some = [served(index, f"app{number}") for number in range(3)]
    total = sum(wheel.size or 0 for wheel in some)
    for _ in range(2):
        reported: list[tuple[int, int]] = []
        fetch(some, progress=lambda done, of: reported.append((done, of)))  # noqa: B023 - called before the next round
        assert reported[-1] == (total, total)
        assert reported == sorted(reported)


def test_files_of_this_machine_are_copied(tmp_path: Path) -> None:
    path = make_wheel(tmp_path / "a folder", "app", "1.0")
    for url in (path.as_uri(), str(path)):
        wheel = Wheel(package="app", version="1.0", filename=path.name, url=url, sha256=sha256(path))
        assert fetch([wheel])[wheel.sha256].read_bytes() == path.read_bytes()
        fetch([wheel])[wheel.sha256].unlink()
    path.unlink()
    with pytest.raises(FetchError, match=r"(?s)cannot get app 1\.0 from .*No such file.*hint: .*lock again"):
        fetch([wheel])


def test_a_wrong_hash_names_package_file_and_both(index: Index) -> None:
    wheel = replace(served(index), sha256="0" * 64)
    real = sha256(index.folder / wheel.filename)
    with pytest.raises(FetchError, match=rf"(?s)app 1\.0: {wheel.filename} .*sha256 {real}\nlocked {'0' * 64}"):
        fetch([wheel])
    assert kept() == []
    assert len(index.requests) == 1


@pytest.mark.parametrize("troubles", [[500, 502], [-1, 503], [429]])
def test_passing_troubles_are_tried_again(index: Index, troubles: list[int]) -> None:
    """Errors of the server, and answers that end early."""
    wheel = served(index)
    index.fail[f"/files/{wheel.filename}"] = list(troubles)
    reported: list[int] = []
    assert sha256(fetch([wheel], progress=lambda done, of: reported.append(done))[wheel.sha256]) == wheel.sha256
    assert len(index.requests) == len(troubles) + 1
    assert reported[-1] == wheel.size
    assert kept() == [wheel.filename]


@pytest.mark.parametrize(
    ("status", "tries", "said"),
    [
        (503, 3, "503"),
        (404, 1, "404 Not Found.*hint: the index no longer has it"),
        (401, 1, "401.*hint: put user"),
        (409, 1, "409 Conflict"),
    ],
)
def test_lasting_troubles_are_not(index: Index, status: int, tries: int, said: str) -> None:
    wheel = served(index)
    index.fail[f"/files/{wheel.filename}"] = [status] * 9
    with pytest.raises(FetchError, match=rf"(?s)cannot get app 1\.0 from .*{said}"):
        fetch([wheel])
    assert len(index.requests) == tries
    assert kept() == []


def test_one_failure_does_not_lose_the_others(index: Index) -> None:
    good, bad = served(index, "good"), replace(served(index, "bad"), sha256="0" * 64)
    with pytest.raises(FetchError, match="bad"):
        fetch([good, bad])
    fetch([good])
    assert index.count("good") == 1


def test_what_an_interrupted_download_left_is_replaced(tmp_path: Path, index: Index) -> None:
    """A process that is killed in the middle leaves a file of another name."""
    wheel = served(index)
    code = (
        "import os; from skyfab.env import wheels\n"
        f"wheel = wheels.Wheel(package='app', version='1.0', filename={wheel.filename!r}, url={wheel.url!r}, "
        f"sha256={wheel.sha256!r})\n"
        "wheels.fetch([wheel], progress=lambda done, total: os._exit(9))\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    (left,) = kept()
    assert left != wheel.filename
    assert sha256(fetch([wheel])[wheel.sha256]) == wheel.sha256
    assert kept() == [wheel.filename]


def test_threads_and_processes_that_want_the_same_fetch_it_once(index: Index) -> None:
    wheel = served(index)
    code = (
        "from skyfab.env import wheels\n"
        f"wheel = wheels.Wheel(package='app', version='1.0', filename={wheel.filename!r}, url={wheel.url!r}, "
        f"sha256={wheel.sha256!r})\n"
        "print(wheels.fetch([wheel])[wheel.sha256])\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    here = {str(found[wheel.sha256]) for found in at_once(lambda _: fetch([wheel]), range(4))}
    there = {child.communicate()[0].strip() for child in children}
    assert here == there
    assert len(index.requests) == 1


def test_a_download_takes_little_memory(tmp_path: Path) -> None:
    """From a file, since the server of these tests lives in the same process."""
    path = make_wheel(tmp_path, "big", "1.0", files={"big/data": os.urandom(12_000_000)})
    small = make_wheel(tmp_path, "small", "1.0")
    files = {
        one: Wheel(package="x", version="1.0", filename=one.name, url=str(one), sha256=sha256(one))
        for one in (path, small)
    }
    fetch([files[small]])  # whatever is imported only now
    tracemalloc.start()
    try:
        fetch([files[path]])
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


# ---- credentials


def in_the_url(private: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    return True


def in_pips_configuration(private: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"https://other.example/simple {private.secret_url}")
    return False


def in_uvs_variables(private: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("UV_INDEX", f"the-lab={private.url}")
    monkeypatch.setenv("UV_INDEX_THE_LAB_USERNAME", "me")
    monkeypatch.setenv("UV_INDEX_THE_LAB_PASSWORD", "pass")
    return False


def in_netrc(private: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password pass\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return False


@pytest.mark.parametrize("somewhere", [in_the_url, in_pips_configuration, in_uvs_variables, in_netrc])
def test_credentials_may_be(
    private: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, somewhere: Callable[..., bool]
) -> None:
    """The file has moved, on the same host."""
    wheel = served(private, secret=somewhere(private, tmp_path, monkeypatch), folder="moved")
    assert sha256(fetch([wheel])[wheel.sha256]) == wheel.sha256


def test_credentials_do_not_go_along_to_another_host(index: Index, private: Index) -> None:
    wheel = served(private, secret=True)
    index.folder.mkdir()
    (index.folder / wheel.filename).write_bytes((private.folder / wheel.filename).read_bytes())
    heard: list[str] = []
    real_index, real_private = index.answer, private.answer

    def overheard(path: str, login: str) -> tuple[int, bytes]:
        heard.append(login)
        return real_index(path, login)

    def moved(path: str, login: str) -> tuple[int, bytes]:
        status, body = real_private(path, login)
        return (302, f"{index.root}{path}".encode()) if status == 200 else (status, body)

    index.answer, private.answer = overheard, moved  # type: ignore[method-assign]
    fetch([wheel])
    assert heard == [""]


def test_credentials_are_not_shown(private: Index) -> None:
    wheel = replace(served(private, secret=True), url=private.secret_url.replace("pass", "wrong-one") + "/x.whl")
    with pytest.raises(FetchError) as caught:
        fetch([wheel])
    assert "wrong-one" not in str(caught.value) and "wrong-one" not in repr(wheel)


def test_a_proxy_is_asked(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index plays the proxy: it is asked for the whole URL."""
    path = index.add("app", "1.0")
    asked: list[str] = []

    def proxy(url: str, login: str) -> tuple[int, bytes]:
        asked.append(url)
        return 200, path.read_bytes()

    index.answer = proxy  # type: ignore[method-assign]
    monkeypatch.setenv("PIP_PROXY", index.root)
    url = f"http://files.example/{path.name}"
    fetch([Wheel(package="app", version="1.0", filename=path.name, url=url, sha256=sha256(path))])
    assert asked == [url]


def test_a_socks_proxy_is_refused_unless_it_is_not_asked(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = index.add("app", "1.0")
    about = {"package": "app", "version": "1.0", "filename": path.name, "sha256": sha256(path)}
    monkeypatch.setenv("ALL_PROXY", "socks5://me:secret@127.0.0.1:9")
    for scheme in ("http", "https"):
        with pytest.raises(UsageError, match="through a SOCKS proxy") as caught:
            fetch([Wheel(url=f"{scheme}://files.example/{path.name}", **about)])
        assert "secret" not in str(caught.value)
        assert f"{scheme.upper()}_PROXY=http://" in str(caught.value.hint)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch([Wheel(url=f"{index.root}/files/{path.name}", **about)])


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1, which nobody knows, and its key, in one file."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "index")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "cert.pem").write_bytes(made.public_bytes(pem) + plain)
    return folder / "cert.pem"


@pytest.mark.parametrize("asks", [False, True], ids=["", "for a certificate"])
def test_certificates_are_checked_as_uv_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    file = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(file))
    context.load_cert_chain(file)
    context.verify_mode = ssl.CERT_REQUIRED if asks else ssl.CERT_NONE
    with Index(tmp_path / "index", tls=context) as index:
        wheel = served(index)
        with pytest.raises(FetchError, match=r"(?i)certificate"):
            fetch([wheel])
        port = index.root.rpartition(":")[2]
        if asks:
            monkeypatch.setenv("SSL_CERT_FILE", str(file))
            with pytest.raises(FetchError):
                fetch([wheel])
            monkeypatch.setenv("SSL_CLIENT_CERT", str(file))
            fetch([wheel])
            return
        for name, value, is_trusted in (
            ("SSL_CERT_FILE", str(file), True),
            ("UV_INSECURE_HOST", "127.0.0.1", True),
            ("UV_INSECURE_HOST", f"other, 127.0.0.1:{port}", True),
            ("UV_INSECURE_HOST", "127.0.0.1:1", False),
        ):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                other = served(index, f"app{len(kept())}")
                if is_trusted:
                    assert fetch([other])
                else:
                    with pytest.raises(FetchError):
                        fetch([other])


# ---- tags


@pytest.mark.parametrize(
    ("target", "order", "never"),
    [
        (
            Target(system="Linux", arch="x86_64", libc="glibc 2.28", python="3.11"),
            ["cp311-cp311-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_17_x86_64",
             "cp311-cp311-manylinux2014_x86_64", "cp311-cp311-manylinux_2_12_x86_64",
             "cp311-cp311-manylinux2010_x86_64", "cp311-cp311-manylinux_2_11_x86_64",
             "cp311-cp311-manylinux_2_5_x86_64", "cp311-cp311-manylinux1_x86_64", "cp311-cp311-linux_x86_64",
             "cp311-abi3-manylinux_2_17_x86_64", "cp38-abi3-manylinux_2_17_x86_64",
             "py3-none-manylinux_2_17_x86_64", "py3-none-any"],
            ["cp311-cp311-manylinux_2_29_x86_64", "cp312-cp312-manylinux_2_28_x86_64",
             "cp311-cp311-musllinux_1_1_x86_64", "cp311-cp311-manylinux_2_4_x86_64"],
        ),
        (
            Target(system="Linux", arch="aarch64", libc="musl 1.2.4", python="3.13"),
            ["cp313-cp313-musllinux_1_2_aarch64", "cp313-cp313-musllinux_1_1_aarch64",
             "cp313-cp313-musllinux_1_0_aarch64", "py3-none-any"],
            ["cp313-cp313-manylinux_2_17_aarch64", "cp313-cp313-musllinux_1_3_aarch64"],
        ),
        (
            Target(system="Darwin", arch="arm64", libc="", python="3.11"),
            ["cp311-cp311-macosx_13_0_arm64", "cp311-cp311-macosx_12_0_arm64", "cp311-cp311-macosx_11_0_arm64",
             "cp311-cp311-macosx_11_0_universal2"],
            ["cp311-cp311-macosx_11_0_x86_64", "cp311-cp311-macosx_14_0_arm64"],
        ),
    ],
)  # fmt: skip
def test_a_target_takes_the_wheels_made_for_it_best_first(target: Target, order: list[str], never: list[str]) -> None:
    found = wheels.tags(target)
    places = [found.index(Tag(*tag.split("-"))) for tag in order]
    assert places == sorted(places)
    assert not [tag for tag in never if Tag(*tag.split("-")) in found]
