"""Setup lines of hosts and images: shell lines that run before Python, in the environment of which workers run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.lab import Lab
from skyfab.session.bootstrap import Bootstrap
from skyfab.session.bundle import Bundle

LOUD = "echo out; echo err >&2; head -c 300000 /dev/zero | tr '\\0' x"


@sky.function
def variables(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


@sky.function
def initial(name: str) -> str | None:
    """What the process was started with: a library's search path is read then, and never again."""
    text = Path(f"/proc/{os.getppid()}/environ").read_text()
    return dict(one.partition("=")[::2] for one in text.split("\0")).get(name)


def pool(hosts: list[sky.Host], setup: str = "") -> sky.Compute:
    return sky.Compute(hosts, image=sky.Image(setup=setup), ui="none")


@pytest.fixture
def host(transport: str, hosts_of: Callable[..., list[sky.Host]]) -> list[sky.Host]:
    return hosts_of(transport, 1)


def test_workers_have_the_variables_of_setup_lines(host: list[sky.Host]) -> None:
    lines = """
        first="it's \\$HOME \\\\ !x é"

        export FIRST="$first" COUNT=$#   # a comment
        export PATH=/opt/tool/bin:$PATH \\
            LD_LIBRARY_PATH=/opt/tool/lib
    """
    with pool(host, lines) as compute:
        first, count, path, library, left = (
            variables("FIRST", "COUNT", "PATH", "LD_LIBRARY_PATH", "skyfab_l") >> compute
        )
        assert (first, count, library, left) == ("it's $HOME \\ !x é", "0", "/opt/tool/lib", None)
        assert path is not None
        assert path.startswith("/opt/tool/bin:")
        assert initial("LD_LIBRARY_PATH") >> compute == "/opt/tool/lib"


def test_lines_of_the_host_come_first_and_variables_of_the_image_last(
    hosts_of: Callable[..., list[sky.Host]],
) -> None:
    hosts = hosts_of("openssh", 2, setup="export A=host B=host C=host")
    image = sky.Image(setup="export B=$B-image C=image", env={"C": "env"})
    with sky.Compute(hosts, image=image, ui="none") as compute:
        assert variables("A", "B", "C") @ compute == [["host", "host-image", "env"]] * 2


def test_what_lines_print_and_read_disturbs_nothing(host: list[sky.Host]) -> None:
    with pool(host, f"{LOUD}\ncat\nread -r word || export A=none") as compute:
        assert variables("A") >> compute == ["none"]


@pytest.mark.parametrize(
    ("lines", "failed", "said"),
    [
        ("export A=1\nmodule-of-nobody load cuda\nexport A=2", "module-of-nobody load cuda", "not found"),
        ("exit 7", "'exit 7' exited with 7", ""),
        ("if true", "if true", "yntax error"),
    ],
)
def test_a_line_that_fails_is_named_with_its_output(host: list[sky.Host], lines: str, failed: str, said: str) -> None:
    with pytest.raises(sky.HostUnfit) as raised:
        pool(host, lines).open()
    assert raised.value.host == host[0].name
    first, _, output = raised.value.message.partition("\n")
    assert first.startswith("its setup failed: ")
    assert failed in first
    assert said in output
    assert "setup = … in the inventory" in str(raised.value.hint)


def test_a_failing_line_before_an_environment_is_made_is_named_too(hosts_of: Callable[..., list[sky.Host]]) -> None:
    with pytest.raises(sky.HostUnfit, match="its setup failed: 'false' exited with 1"):
        sky.Compute(hosts_of("openssh", 1), image=sky.Image(setup="false", apt=["coreutils"]), ui="none").open()


@pytest.mark.parametrize("shells", [["bash", "sh"], ["sh"]], ids=str)
def test_bash_is_preferred_and_not_needed(shells: list[str], tmp_path: Path) -> None:
    """The first command, with a PATH that has these shells; it then runs the script that it is sent."""
    for name in (*shells, "mktemp", "od", "tr", "tail", "rm", "ls", "mkdir", "head", "dd", "chmod"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    host = sky.Host(name="here", transport="local", cache=str(tmp_path / "cache"))
    sent = 'echo "A is $A, B is $B"'

    def said(setup: str) -> str:
        start = Bootstrap(host=host, session="s", bundle=Bundle("none", ()), python="none", setup=setup)
        return subprocess.run(
            ["/bin/sh", "-c", start.command()],
            input=f"{len(sent)}\n{sent}",
            env={"PATH": str(tmp_path), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=170,
        ).stdout

    lines = f"PATH={tmp_path}\nexport A=1 B=${{BASH_VERSION:+bash}}"  # /etc/profile may have set another PATH
    assert said(lines) == f"=skyfab=s=nopython\nA is 1, B is {'bash' if 'bash' in shells else ''}\n"
    assert said("nonsense").startswith(f"=skyfab=s=setup 127 {b'nonsense'.hex()} ")
    assert list(tmp_path.glob("tmp*")) == []


def test_functions_of_a_login_shell_can_be_used(hosts_of: Callable[..., list[sky.Host]], namespaces: Lab) -> None:
    """`module` is one of them: it is defined in what a login shell reads."""
    hosts = hosts_of("openssh", 1)
    machine = namespaces[hosts[0].name]
    file = f"~{hosts[0].user}/.bash_profile"  # in a lab of an ordinary user, nobody can write to /etc
    machine.run(["sh", "-c", f"echo 'module() {{ export LOADED=$2; }}; echo welcome' >{file}"])
    try:
        with pool(hosts, "module load cuda") as compute:
            assert variables("LOADED") >> compute == ["cuda"]
    finally:
        machine.run(["sh", "-c", f"rm {file}"])


def test_an_interpreter_that_lines_bring_is_found(hosts_of: Callable[..., list[sky.Host]], namespaces: Lab) -> None:
    hosts = hosts_of("openssh", 1, python="auto")
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    script = f"mkdir -p /opt/tool/bin; ln -sf $(command -v {name} || command -v python3) /opt/tool/bin/{name}"
    machine = namespaces[hosts[0].name]
    machine.run(["sh", "-c", script])
    try:
        with pool(hosts, "export PATH=/opt/tool/bin:$PATH") as compute:
            assert executable() >> compute == f"/opt/tool/bin/{name}"
    finally:
        machine.run(["rm", "-r", "/opt/tool"])


@sky.function
def executable() -> str:
    return sys.executable
