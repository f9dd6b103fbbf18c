"""`Run`: what it makes of the answers of its hosts. The hosts are replaced: they answer in this process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from stage.fakes import EndsTheProgram
from stage.run_hosts import ID, Hosts, Several, lines, lost, part, raised, returned, stored

import skyfab as sky
from skyfab.detached.find import runs_of
from skyfab.protocol.messages import Ended
from skyfab.session.ask import Asker
from skyfab.session.question import Reply


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Two hosts that have done a run, with the results 10 and 11."""
    hosts = Hosts("a", "b")
    monkeypatch.setattr(Asker, "ask_one", lambda asker, question, host: hosts.answer(asker, question, host))
    monkeypatch.setattr("skyfab.detached.run.PACE", 0.0)
    for place, name in enumerate(("a", "b")):
        hosts.says |= {
            (name, "runs"): part(place),
            (name, f"result.{place}"): returned(10 + place),
            (name, "logs"): lines((place, f"of {name}", 5.0 - place)),
            (name, "runs.stop"): None,
        }
    return hosts


def unfit(host: str) -> sky.HostUnfit:
    return sky.HostUnfit("no Python", host=host)


# ---- what is known of it


@pytest.mark.parametrize(
    ("states", "state", "ended"),
    [
        (("done", "done"), "done", True),
        (("failed", "stopped"), "stopped", True),
        (("unreachable", "running"), "running", False),
        (("running", "lost"), "running", False),
        (("done", "lost"), "lost", True),
        (("done",), "done", False),
    ],
)
def test_the_state_on_one_host_may_be_that_of_the_run(
    two: Hosts, states: tuple[str, ...], state: str, ended: bool
) -> None:
    two.says |= {("a", "runs"): part(0, states[0]), ("b", "runs"): part(1, states[1]) if states[1:] else []}
    run = two.run()
    assert (run.state, run.has_ended) == (state, ended)
    assert [part.state for part in run.parts] == list(states)


def test_a_run_is_described_by_its_hosts(two: Hosts) -> None:
    two.says["a", "runs"] = part(0, last="[Gloo] Rank 0 is connected to 1 peer ranks.", failed={"0": 30.0})
    two.says["b", "runs"] = part(1, started=900.0, last=f"step 3 {'x' * 300}", failed={"1": 20.0})
    run = two.run()
    assert (run.id, run.name, run.function, run.hosts, run.world_size) == (ID, "night", "train", ["a", "b"], 2)
    assert run.started == 900.0, "on the first of its hosts"
    assert run.last == f"step 3 {'x' * 193}", "the first that a framework did not write, if it is short"
    assert run.failed == [("b", 1), ("a", 0)], "in the order of time"
    assert repr(run) == "<run 01234567 night: done>"
    assert "<td>b</td><td>done</td>" in run._repr_html_().replace("\n", "")


def test_hosts_that_were_not_asked_and_hosts_that_do_not_answer(two: Hosts) -> None:
    two.says |= {("a", "runs"): part(0, hosts=("a", "b", "c")), ("b", "runs"): lost("b")}
    run = two.run()
    assert (run.silent, run.unasked) == (["b"], ["c"])
    two.says["b", "runs"] = part(1, hosts=("a", "b", "c"))
    assert (run.status, run.silent, run.unasked) == ("done", [], ["c"])
    with pytest.raises(sky.UsageError, match="run 01234567 is also on c, which the inventory does not list"):
        run.result()
    two.says |= {("a", "runs"): lost("a"), ("b", "runs"): unfit("b")}
    assert (run.status, run.silent, run.has_ended) == ("unreachable", ["a", "b"], False)


def test_hosts_that_have_other_names_now_are_those_that_respond(two: Hosts) -> None:
    """The same machines, in an inventory with other names; only machines of the inventory are asked."""
    two.says |= {("a", "runs"): part(0, hosts=("old1", "old2")), ("b", "runs"): part(1, hosts=("old1", "old2"))}
    two.says |= {(name, "logs"): lines((rank, f"of {name}", 1.0)) for rank, name in enumerate("ab")}
    run = two.run()
    assert (run.hosts, run.unasked, run.silent, run.status) == (["a", "b"], [], [], "done")
    assert texts(run) == ["of a", "of b"]
    two.says["b", "runs"] = lost("b")
    run = two.run()
    assert (run.hosts, run.unasked) == (["a", "old2"], ["old2"])
    with pytest.raises(sky.UsageError, match="also on old2, which the inventory does not list") as raised:
        texts(run)
    assert "one that has a new name must respond" in str(raised.value)


def test_a_run_that_is_lost_on_one_host_is_followed_on_the_other(two: Hosts) -> None:
    """`result` does not wait for it: its ranks may wait for the lost ones."""
    two.says["a", "runs"] = Several(*[part(0, "running")] * 3, part(0))
    two.says["a", "logs"] = Several(lines((0, "of a", 1.0)), lines())
    two.says["b", "logs"] = Several(lines((1, "of b", 2.0)), lines())
    two.says["b", "runs"] = part(1, "lost")
    run = two.run()
    with pytest.raises(sky.HostLost, match="the host was restarted"):
        run.result()
    assert run.failed == [("b", 1)]
    failed: list[tuple[str, int]] = []
    found = [(line.host, line.text) for line in run.lines(follow=True, failed=lambda *one: failed.append(one))]
    assert found == [("a", "of a"), ("b", "of b")]
    assert (run.state, failed) == ("lost", [("b", 1)])


@pytest.mark.torch
def test_the_end_of_a_device_is_not_unpickled(two: Hosts) -> None:
    pytest.importorskip("torch")
    two.says |= {("a", "runs"): part(0, "failed", hosts=("a",)), ("b", "runs"): []}
    two.says["a", "result.0"] = returned(EndsTheProgram())
    with pytest.raises(sky.BroadcastError) as caught:
        sky.attach_device("night", two.hosts, inventory=two.inventory)
    assert isinstance(caught.value.exceptions[0], sky.UntrustedResult)


def test_a_run_that_a_host_no_longer_has_is_lost_there(two: Hosts) -> None:
    run = two.run()
    two.says["b", "runs"] = part(1, id="another")
    assert run.status == "lost"
    assert [(one.host, one.state, one.about.place) for one in run.parts] == [("a", "done", 0), ("b", "lost", 1)]


@pytest.fixture
def three(two: Hosts) -> Hosts:
    """Two hosts, and this machine."""
    here = sky.Host(name="here", transport="local")
    two.inventory = sky.Inventory(hosts={**two.inventory.hosts, "here": here})
    two.hosts.append(here)
    return two


def test_files_are_reported_of_other_machines_and_only_in_folders_that_a_command_can_name(three: Hosts) -> None:
    about = {"count": 1, "size": 5, "names": ["m.pt"], "complete": True, "common": "m.pt"}
    files = [{"workdir": workdir, **about} for workdir in ("/data", "/data; reboot")]
    for place, host in enumerate(three.hosts):
        three.says[host.name, "runs"] = part(place, hosts=("a", "b", "here"), files=files)
    run = three.run()
    assert [(event.host, event.path) for event in run.files()] == [("a", "/data"), ("b", "/data")]
    (unknown,) = runs_of(run.parts, sky.Inventory(hosts={}), [])
    assert unknown.files() == []


# ---- hosts that contradict each other


@pytest.mark.parametrize(
    "wrong",
    [
        *({"world": 3}, {"on": "one"}, {"elastic": True}, {"name": "other"}, {"function": "other"}, {"ranks": [0]}),
        *({"hosts": ("b",), "place": 0, "ranks": [0], "world": 1}, {"place": 0}, {"place": 0, "ranks": [0]}),
    ],
    ids=str,
)
def test_a_host_that_contradicts_another(two: Hosts, wrong: dict[str, Any]) -> None:
    """Else it could replace the results of others, or have them not asked."""
    two.says["b", "runs"] = part(**{"place": 1, "workdir": "of-b", **wrong})
    run = two.run()
    assert not run.has_ended
    for use in (run.result, run.stop, run.look, lambda: list(run.logs())):
        with pytest.raises(sky.ProtocolError, match=r"what it reports of run 01234567 contradicts what . reports"):
            use()
    assert two.run(results="data").parts, "it is listed"


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (part(0, workdir="of-b"), "b: what it reports of run 01234567 contradicts what a reports"),
        (part(0), r"ranks \[0, 0\] instead of those below 2"),
    ],
    ids=["other", "equal"],
)
def test_a_host_that_takes_the_place_of_another_later(two: Hosts, later: Any, problem: str) -> None:
    two.says |= {("b", "runs"): Several(part(1), part(1), later), ("b", "result.0"): returned(99)}
    run = two.run()
    assert run.status == "done"
    with pytest.raises(sky.ProtocolError, match=problem):
        run.result()


def test_ranks_that_no_host_has(two: Hosts) -> None:
    two.says |= {("a", "runs"): part(0, world=3), ("b", "runs"): part(1, world=3)}
    with pytest.raises(sky.ProtocolError, match=r"results of ranks \[0, 1\] instead of those below 3"):
        two.run().result()


# ---- output


def texts(run: sky.Run, **options: Any) -> list[str]:
    return [line.text for line in run.lines(**options)]


def test_lines_of_all_hosts_are_merged_by_time(two: Hosts) -> None:
    run = two.run()
    assert list(run.logs()) == [(1, "out", "of b"), (0, "out", "of a")]
    assert texts(run, tail=1) == ["of a"]
    two.says["a", "runs"] = part(0, "running")
    assert run.status == "running"
    assert len(list(run.logs())) == len(texts(run)) == 2, "those that are there"


def test_lines_of_one_host_come_before_the_error_of_another(two: Hosts) -> None:
    run = two.run()
    two.says["b", "logs"] = lost("b")
    found = run.logs()
    assert next(found) == (0, "out", "of a")
    with pytest.raises(sky.HostLost):
        next(found)
    two.says["a", "logs"] = unfit("a")
    with pytest.raises(sky.HostUnfit):
        list(run.logs())


def test_following_continues_to_the_end_across_lost_connections(two: Hosts) -> None:
    run = two.run()
    two.says["a", "runs"] = Several(part(0, "running"), lost("a"), part(0))
    two.says["a", "logs"] = Several(lines((0, "one", 1.0)), lines((0, "two", 2.0)), lost("a"), lines((0, "three", 3.0)))
    two.says["b", "logs"] = Several(lines(), lost("b"), lines((1, "late", 2.5)), lines())
    assert texts(run, follow=True) == ["one", "two", "late", "three"]


def test_following_ends_with_an_error_that_a_retry_does_not_resolve(two: Hosts) -> None:
    run = two.run()
    two.says["b", "runs"] = unfit("b")
    with pytest.raises(sky.HostUnfit):
        texts(run, follow=True)
    two.says["b", "runs"] = sky.Unreachable("no route", host="b")
    two.says["b", "logs"] = sky.Unreachable("no route", host="b")
    found = run.logs(follow=True)
    assert next(found) == (0, "out", "of a")
    with pytest.raises(sky.Unreachable):  # it was retried before that: see `Asker`
        list(found)


def test_a_failure_is_reported_once_and_while_others_run(two: Hosts) -> None:
    two.says["a", "runs"] = Several(*[part(0, "running")] * 3, part(0, "failed", failed={"0": 9.0}))
    two.says["b", "runs"] = part(1, "failed", failed={"1": 8.0})
    failed: list[tuple[str, int]] = []
    run = two.run()
    texts(run, follow=True, failed=lambda *one: failed.append(one))
    assert failed == [("b", 1)]
    texts(run, failed=lambda *one: failed.append(one))
    assert failed == [("b", 1)], "the run has ended"


# ---- result


def test_results_are_in_the_order_of_ranks(two: Hosts) -> None:
    two.says["a", "runs"] = part(0, ranks=[1])
    two.says["b", "runs"] = part(1, ranks=[0])
    two.says |= {("a", "result.1"): returned("one"), ("b", "result.0"): returned("zero")}
    assert two.run().result() == ["zero", "one"]
    assert two.asked.count(("a", "runs.fetched")) == 1


def test_results_are_waited_for(two: Hosts) -> None:
    two.says["a", "runs"] = Several(*[part(0, "running")] * 3, part(0))
    two.says["b", "runs"] = Several(part(1), lost("b"), part(1))
    two.says["b", "result.1"] = Several(lost("b"), returned(11))
    two.says["a", "runs.fetched"] = unfit("a")  # a full disk: the result has been fetched all the same
    assert two.run().result(60) == [10, 11]
    assert two.asked.count(("a", "result.0")) == 1, "what is there is not fetched again"


def test_ctrl_c_says_that_the_run_was_not_stopped(two: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    two.says["a", "runs"] = part(0, "running")
    run = two.run()
    monkeypatch.setattr("skyfab.detached.run.time.sleep", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        run.result()
    assert vars(raised.value)["stopped"] == "the run was not stopped; to stop it: skyfab stop 01234567"


def test_a_result_that_does_not_come_in_time(two: Hosts) -> None:
    two.says["a", "runs"] = part(0, "running")
    run = two.run()
    with pytest.raises(TimeoutError, match="run 01234567 is still running"):
        run.result(0.0)
    two.says["a", "runs"] = lost("a")
    with pytest.raises(TimeoutError, match="run 01234567 does not respond: a: its connection broke"):
        run.result(0.0)
    two.says["a", "runs"] = unfit("a")
    with pytest.raises(sky.HostUnfit):
        run.result(60)


def test_a_lost_host_is_reported_before_others_answer(two: Hosts) -> None:
    run = two.run()
    two.says |= {("a", "runs"): [], ("b", "runs"): lost("b")}
    with pytest.raises(sky.HostLost, match="the files of run 01234567 were removed") as raised:
        run.result(60)
    assert (raised.value.host, raised.value.hint) == ("a", "its output until then: skyfab logs 01234567")


def test_the_first_failure_in_time_comes_first(two: Hosts) -> None:
    two.says["a", "runs"] = part(0, "failed", ranks=[0, 1], world=4, failed={"0": 30.0})
    two.says["b", "runs"] = part(1, "failed", ranks=[2, 3], world=4, failed={"2": 20.0})
    ended = stored(Ended(why="cancelled", text="", traceback=""))
    two.says |= {("a", "result.0"): raised(ValueError("later")), ("a", "result.1"): ended}
    two.says |= {("b", "result.2"): raised(ValueError("first")), ("b", "result.3"): returned(3)}
    run = two.run()
    with pytest.raises(sky.BroadcastError, match="train failed on 2 of 4 ranks; 1 stopped") as error:
        run.result()
    assert [str(one) for one in error.value.exceptions] == ["first", "later"]
    assert error.value.results[3] == 3
    two.says["a", "runs"] = lost("a")
    assert run.status == "failed"
    with pytest.raises(sky.BroadcastError, match="train failed on 1 of 2 ranks"):
        run.raise_failure()  # of those that answer
    with pytest.raises(sky.BroadcastError, match="train failed on 1 of 2 ranks"):
        two.run(results="data").raise_failure()  # what rank 3 returned is a pickle
    two.says["b", "result.2"] = lost("b")
    run.raise_failure()


def test_a_run_on_one_host_returns_or_raises_as_a_call(two: Hosts) -> None:
    two.says |= {("a", "runs"): part(0, hosts=("a",), on="one"), ("b", "runs"): []}
    run = two.run()
    assert run.result() == 10
    two.says["a", "result.0"] = raised(KeyError("lr"))
    with pytest.raises(KeyError, match="lr"):
        run.result()
    two.says["a", "result.0"] = None
    with pytest.raises(sky.SkyfabError, match=r"rank 0 of train was stopped$") as error:
        run.result()
    assert (error.value.host, error.value.rank) == ("a", None)


def test_the_results_of_an_elastic_run_are_those_of_its_last_ranks(two: Hosts) -> None:
    for place, (name, found) in enumerate((("a", [(1, "one")]), ("b", [(0, "zero"), (2, "two")]))):
        two.says[name, "runs"] = part(place, elastic=True)
        two.says[name, f"result.{place}"] = returned(found)
    assert two.run().result() == ["zero", "one", "two"]
    for found in (7, [(1,)], [("a", 1), (2, 2)]):
        two.says["b", "result.1"] = returned(found)
        with pytest.raises(sky.ProtocolError, match="invalid results"):
            two.run().result()


def test_pickles_of_hosts_that_are_not_trusted_are_refused(two: Hosts) -> None:
    with pytest.raises(sky.BroadcastError) as raised:
        two.run(results="data").result()
    assert {type(error) for error in raised.value.exceptions} == {sky.UntrustedResult}


def test_a_run_that_does_not_stop(two: Hosts) -> None:
    run = two.run()
    run.stop()
    two.says["b", "runs.stop"] = 4321
    with pytest.raises(sky.HostUnfit, match="process 4321 is still running after 10 s") as raised:
        run.stop()
    assert (raised.value.host, raised.value.hint) == ("b", "wait, or on the host: kill -9 4321")
    two.says["b", "runs.stop"] = -1  # kill -9 -1 would end everything
    with pytest.raises(sky.HostUnfit) as raised:
        run.stop()
    assert raised.value.hint is None


# ---- finding runs


@pytest.fixture
def several(two: Hosts) -> Hosts:
    """Runs of which some have the same name, or ids that begin alike."""

    def said(id: str, name: str, started: float, state: str = "done") -> Reply:  # noqa: A002
        return Reply(part(0, state, hosts=("a",), id=id, name=name, started=started), b"")

    two.says["a", "runs"] = [
        said("aaaa1111" * 2, "old", 1.0),
        said("aaaa2222" * 2, "twin", 2.0, "running"),
        said("bbbb3333" * 2, "twin", 3.0),
        said("bbbb4444" * 2, "aaaa1", 4.0),
        *(said(f"cccc{number}" * 3, "more", 10.0 - number) for number in range(5)),
    ]
    two.says["b", "runs"] = []
    return two


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("old", "aaaa1111"),
        ("twin", "aaaa2222"),
        ("bbbb3333", "bbbb3333"),
        ("bbbb33333", "error"),
        ("bbbb3333bbb", "bbbb3333"),
        ("aaaa2", "aaaa2222"),
        ("aaaa1", "bbbb4444"),
    ],
)
def test_a_run_is_named_or_its_id_begun(several: Hosts, typed: str, found: str) -> None:
    if found == "error":
        with pytest.raises(sky.UsageError, match="no run 'bbbb33333' on these hosts") as raised:
            sky.attach(typed, several.hosts)
        assert raised.value.hint == "did you mean bbbb3333b?"
    else:
        assert sky.attach(typed, several.hosts).id[:8] == found


def test_several_ids_that_begin_alike(several: Hosts) -> None:
    with pytest.raises(sky.UsageError, match="2 runs begin with 'bbbb': bbbb4444, bbbb3333") as raised:
        sky.attach("bbbb", several.hosts)
    assert raised.value.hint == "type more of the ID, or the name"
    with pytest.raises(sky.UsageError, match=r"5 runs begin with 'cccc': cccc0ccc, cccc1ccc, cccc2ccc, cccc3ccc\n"):
        sky.attach("cccc", several.hosts)


def test_no_such_run(several: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # hints name the inventory that other tests have used last

    def message(typed: str, **options: Any) -> tuple[str, str | None]:
        with pytest.raises(sky.UsageError) as raised:
            sky.attach(typed, **options)
        return raised.value.message, raised.value.hint

    assert message("") == ("no run was named", "to list runs: skyfab runs")
    assert message("xyz", hosts=several.hosts) == ("no run 'xyz' on these hosts", "to list runs: skyfab runs")
    assert message("twim", hosts=several.hosts)[1] == "did you mean twin?"
    assert message("xyz", inventory=sky.Inventory(hosts={})) == (
        "no run 'xyz' on this machine (no inventory loaded)",
        "set SKYFAB_INVENTORY, or name its hosts: --hosts=…",
    )
    listed = sky.Inventory(hosts=several.inventory.hosts, source=Path("hosts.toml"))
    where = "the hosts of the inventory or on this machine"
    assert message("xyz", inventory=listed) == (f"no run 'xyz' on {where}", "to list runs: skyfab runs")
    assert message("twim", inventory=sky.Inventory(hosts=several.inventory.hosts))[1] == "did you mean twin?"
    several.asked.clear()
    assert len(sky.runs(inventory=listed)) == 9
    assert {host for host, _ in several.asked} == {"a", "b", "local"}
    several.says["b", "runs"] = lost("b")
    with pytest.raises(sky.HostLost):  # it may be there
        sky.attach("xyz", several.hosts)
    assert sky.attach("old", several.hosts).name == "old"
    with pytest.raises(sky.HostLost):
        sky.runs(several.hosts)
