"""From what a host answers to findings, without hosts."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyfab.errors import AuthenticationRefused, HostKeyRefused, HostUnfit, SkyfabError, Unreachable
from skyfab.host.ask.examine import examine, sshd_setting
from skyfab.inspect.doctor import checks, measure, pairs, report
from skyfab.inspect.doctor.checks import CHECKS, findings
from skyfab.inspect.doctor.examine import refused
from skyfab.inspect.doctor.finding import EXAMINE, Facts, Finding, HostReport
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.session.question import Reply

HOST = Host(name="node1", address="10.0.0.11")
GPU: dict[str, Any] = {"index": 0, "name": "NVIDIA H100", "use": 0, "driver": "550.54"}
FINE: dict[str, Any] = {
    "user": "ada",
    "cache": "/home/ada/.cache/skyfab",
    "filesystem": "ext4",
    "networked": 0,
    "noexec": 0,
    "readonly": 0,
    "inodes": 10**7,
    "inodes_free": 10**6,
    "name_seconds": 0.0,
    "name_error": "",
    "reverse_seconds": 0.0,
    "shell": "/bin/bash",
    "shell_seconds": 0.1,
    "shell_said": "",
    "startups": 10,
    "sessions": 10,
    "files": 1024,
    "processes": 0,
    "kills": 0,
    "lingers": 0,
}


def found_on(gpus: list[dict[str, Any]] | None = None, gpu_error: str | None = None, **other: Any) -> list[Finding]:
    """What is not in order with a host that differs from a good one in this."""
    survey = {**_SURVEY, "python": platform.python_version(), "disk_free": other.pop("disk_free", 10**12)}
    survey |= {"gpus": gpus or [], "gpu_tool": "nvidia-smi" if gpus else None, "gpu_error": gpu_error}
    offset = (other.pop("ahead", 0.0), other.pop("error", 0.0))
    seen = replace(report_of({**FINE, **other, "survey": survey}), offset=offset)
    return [one for one in findings(seen) if one.level != "ok"]


def report_of(said: Any) -> HostReport:
    """A host's answer as it is read."""
    return EXAMINE.parse(HOST, iter([Reply(said, b"")]))


def test_a_good_host_has_no_findings() -> None:
    assert found_on() == [] == found_on([GPU])


@pytest.mark.parametrize(
    ("other", "check", "level", "words"),
    [
        ({"ahead": 300.0}, "clock", "warning", "300.0 s ahead of"),
        ({"ahead": -60.0}, "clock", "warning", "60.0 s behind"),
        ({"name_seconds": None}, "name", "warning", "more than 5 s"),
        ({"name_seconds": 2.0}, "name", "warning", "2.0 s"),
        ({"name_error": "Name or service not known"}, "name", "advice", "Name or service not known"),
        ({"reverse_seconds": None}, "reverse name", "advice", "more than 5 s"),
        ({"shell_said": "Welcome!\nto node1"}, "shell", "warning", "'Welcome!'"),
        ({"shell_seconds": 4.5}, "shell", "advice", "3 s"),
        ({"startups": 2}, "MaxStartups", "advice", "while 2 others"),
        ({"sessions": 1}, "MaxSessions", "warning", "1 session"),
        ({"files": 256}, "limits", "warning", "open files is 256"),
        ({"processes": 100}, "limits", "warning", "processes is 100"),
        ({"kills": 1}, "KillUserProcesses", "warning", "detached runs"),
        ({"disk_free": 10**8}, "disk", "failure", "only 100 MB free"),
        ({"disk_free": 10**9}, "disk", "advice", "only 1.0 GB free"),
        ({"inodes_free": 10}, "inodes", "warning", "only 10 more files"),
        ({"noexec": 1}, "noexec", "failure", "noexec"),
        ({"readonly": 1}, "read-only", "failure", "is read-only"),
        ({"networked": 1, "filesystem": "nfs4"}, "network disk", "advice", "nfs4"),
        ({"gpu_error": "nvidia-smi: no response"}, "GPU tool", "failure", "no response"),
        ({"gpus": [GPU | {"throttled": ["its temperature"]}]}, "throttling", "warning", "by its temperature"),
        ({"gpus": [GPU | {"use": 97}]}, "in use", "advice", "an unknown user, 97 %"),
        (
            {"gpus": [GPU | {"processes": [{"pid": 7, "user": "bob", "command": "python"}]}]},
            *("in use", "advice", "by bob (python)"),
        ),
        ({"gpus": [GPU | {"ecc_errors": 2}]}, "ECC", "failure", "GPU 0 had uncorrectable memory errors"),
        ({"gpus": [GPU | {"driver": "470.82"}]}, "driver", "warning", "470.82 is too old"),
    ],
)
def test_each_finding(other: dict[str, Any], check: str, level: str, words: str) -> None:
    (one,) = found_on(**other)
    assert (one.check, one.level, one.host) == (check, level, "node1")
    assert words in one.what and one.fix


def test_a_slow_answer_is_not_a_wrong_clock() -> None:
    """If it took 30 s to tell the time, its clock may be right."""
    assert found_on(ahead=15.0, error=15.0) == []


_SURVEY = {"os": "Debian", "kernel": "6", "platform": "linux-x86_64", "python": "3.11.2", "cpus": 4}


def test_a_larger_disk_is_offered_where_the_cache_cannot_stay() -> None:
    other: dict[str, Any] = {"other_cache": "/scratch/ada/skyfab", "other_free": 10**12}
    (one,) = found_on(noexec=1, **other)
    assert one.setting == ("cache", '"/scratch/ada/skyfab"') and "/scratch/ada/skyfab" in one.fix
    (one,) = found_on(disk_free=10**9, other_cache="/scratch/ada/skyfab", other_free=10**9)
    assert one.setting is None


def test_gpus_that_are_alike_are_reported_together() -> None:
    bob = {"processes": [{"pid": 7, "user": "bob", "command": "python"}]}
    gpus = [GPU | bob | {"index": number, "use": 90 + number} for number in range(3)]
    hot = [GPU | {"index": number, "throttled": ["its temperature"], "temperature": 80 + number} for number in (3, 4)]
    assert [finding.what for finding in found_on(gpus=[*gpus, *hot])] == [
        "GPU 3, 4 are slowed down by its temperature, at 83 to 84 °C",
        "GPU 0, 1, 2 are in use by bob (python), 90 to 92 %",
    ]


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (Unreachable("no response", hint="is it up?"), "reachability"),
        (AuthenticationRefused("keys refused", hint="ssh-copy-id"), "login"),
        (HostKeyRefused("unknown", hint="skyfab trust"), "host key"),
        (HostUnfit("no Python", hint="install it"), "start"),
    ],
)
def test_a_host_that_cannot_be_opened_is_a_finding(error: SkyfabError, check: str) -> None:
    one = refused(HOST, error)
    assert (one.check, one.level, one.what, one.fix) == (check, "failure", error.message, error.hint)
    assert report.exit_code([one]) == 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a machine that others use too
@given(st.dictionaries(st.sampled_from([*Facts.__dataclass_fields__, "survey"]), JSON), st.booleans())
def test_whatever_a_host_says_is_findings_or_an_error(said: dict[str, Any], whole: bool) -> None:
    base = {**FINE, "survey": _SURVEY} if whole else {}
    try:
        found = findings(report_of({**base, **said}))
    except (ValueError, TypeError, AttributeError, KeyError, HostUnfit):
        return
    assert list(report.lines(found, 1))


def test_this_machine_is_examined() -> None:
    found = report_of(examine(str(Path.home() / ".cache" / "skyfab")))
    assert found.facts.inodes is not None and found.facts.user
    assert {one.check for one in findings(found)} >= {"login", "clock", "disk", "Python"}


def test_settings_of_sshd(tmp_path: Path) -> None:
    """The first value counts, in the order in which files are included; those of Match are for some logins only."""
    (tmp_path / "a.conf").write_text("MaxSessions 3\n")
    (tmp_path / "b.conf").write_text("MaxSessions=4\nPort 22\n")
    main = tmp_path / "sshd_config"
    main.write_text(f"# MaxSessions 1\n\nInclude {tmp_path}/*.conf\nMaxSessions 5\nMatch User x\n  MaxAuthTries 2\n")
    assert [sshd_setting(str(main), name) for name in ("maxsessions", "port", "maxauthtries")] == ["3", "22", None]
    main.write_text(f"Include {main}\n")
    assert sshd_setting(str(main), "maxsessions") is None
    assert sshd_setting(str(tmp_path / "none"), "maxsessions") is None


# ---- the report


def finding(**other: Any) -> Finding:
    return replace(Finding(section="disk", check="disk", host="node1", level="warning", what="full"), **other)


def test_what_is_alike_is_reported_once_and_the_worst_first() -> None:
    found = [
        finding(level="advice", what="small"),
        finding(fix="clean it"),
        finding(host="node2", fix="clean it", setting=("cache", '"/x"')),
        finding(section="login", level="ok"),
    ]
    assert list(report.lines(found, 2, "lab.toml")) == [
        "login    fine",
        "disk     2 warnings, 1 suggestion",
        "  warning: node1, node2: full",
        "    fix: clean it",
        '    in lab.toml: [hosts.node2] cache = "/x"',
        "  advice: node1: small",
        "2 hosts: 2 warnings, 1 suggestion",
    ]


def test_what_is_pasted_has_no_names() -> None:
    found = [
        finding(host="gpu-7 → gpu-8", what="gpu-8 at 10.1.2.3 or fe80::1:2 of ada in /home/ada.b/x, adamant"),
        finding(host="gpu-8", what="bob@eight.example.com through gate.example.com: root may"),
        finding(host="gpu-7", what="eve@gate.example.com refused it"),
        finding(host="gpu-8", what="carol@gate.acme.example refused it"),
    ]
    hosts = [
        Host(name="gpu-7", jump="eve@gate.example.com:22"),
        Host(name="gpu-8", address="eight.example.com", user="bob", jump="gateway"),
    ]
    gateway = Host(name="gateway", address="gate.acme.example", user="carol")
    inventory = Inventory(hosts={host.name: host for host in (*hosts, gateway)})
    text = report.pasted(found, hosts, inventory, ["ada", "", "root"], "1.0")
    assert "host2 disk/disk warning: [user]@host2 through [jump host]: root may" in text
    assert text.count("[user]@[jump host] refused it") == 2
    assert (
        "host1 → host2 disk/disk warning: host2 at [address] or [address] of [user] in /home/[user]/x, adamant" in text
    )
    assert text.startswith("```\nskyfab 1.0, ") and text.endswith("\n```")


# ---- pairs and measurements


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_rounds_of_pairs(count: int) -> None:
    names = [f"node{number}" for number in range(count)]
    rounds = pairs.all_pairs(names)
    for one in rounds:
        hosts = [name for pair in one for name in pair]
        assert len(hosts) == len(set(hosts)), "a host has two parts in a round"
    assert len({frozenset(pair) for one in rounds for pair in one}) == count * (count - 1) // 2
    assert {name for one in rounds[:2] for pair in one for name in pair} == set(names)


def test_the_slow_pair_is_named() -> None:
    rates = {("a", "b"): 1e9, ("b", "c"): 1e9, ("c", "a"): 1e8}
    assert [(one.host, one.level) for one in pairs.bandwidths(rates)] == [
        ("a → b", "ok"),
        ("b → c", "ok"),
        ("c → a", "warning"),
    ]
    assert [one.level for one in pairs.bandwidths({("a", "b"): 1e6})] == ["advice"]


def test_a_host_that_is_slower_than_its_peers_and_than_before_is_named() -> None:
    rates = {"a": {"memory": 10e9}, "b": {"memory": 10e9}, "c": {"memory": 5e9}}
    by_host = {
        one.host: one for one in measure.compared(rates, {"b": [{"memory": 20e9}] * 3, "a": [{"memory": 20e9}] * 2})
    }
    assert {host: one.level for host, one in by_host.items()} == {"a": "ok", "b": "warning", "c": "warning"}
    assert measure.network("a", {("a", "b"): 4.0, ("c", "a"): 2.0, ("b", "c"): 9.0}) == {"network": 3.0}
    assert measure.network("d", {("a", "b"): 4.0}) == {}
    assert "median of 3 earlier" in by_host["b"].what and "median of 3 hosts" in by_host["c"].what


def test_every_module_of_the_checks_is_registered() -> None:
    modules = {path.stem for path in Path(checks.__file__).parent.glob("[!_]*.py")}
    assert {check.__module__.rpartition(".")[2] for check in CHECKS} == modules
