"""`--gpus` and `--when-free` of `skyfab run` and `serve`: several users take GPUs of real hosts, and wait for them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stage.program import Ran, Skyfab
from stage.spot import Spot, until

import skyfab as sky
from skyfab.detached.run import Run
from skyfab.lab import Lab, LabHost

pytestmark = pytest.mark.lab

WORK = """
import os, signal, sys, time

name, spot = sys.argv[1:]

def checkpoint(*_):
    with open(f"{spot}/{name}.checkpoint", "a") as file:
        file.write("saved ")
    sys.exit(0)

signal.signal(signal.SIGTERM, checkpoint)
with open(f"{spot}/{name}.{os.environ['RANK']}", "a") as file:
    file.write(os.environ["CUDA_VISIBLE_DEVICES"] + " ")
while not os.path.exists(f"{spot}/{name}.go"):
    time.sleep(0.02)
print("done", name, os.environ["MASTER_PORT"].isdecimal())
"""


class Queue:
    """Runs on the lab's hosts, each of which has the GPUs 0 and 1, as one of two users."""

    def __init__(self, skyfab: Skyfab, lab: Lab, spot: Spot, folder: Path) -> None:
        self._skyfab = skyfab
        self.spot = spot
        known = sky.Inventory.of(lab.inventory)
        (folder / "work.py").write_text(WORK)
        self.inventories = {}
        for user in ("ada", "root"):
            hosts = {name: replace(host, user=user, gpus=(0, 1)) for name, host in known.hosts.items()}
            path = folder / f"{user}.toml"
            path.write_text(replace(known, hosts=hosts).to_toml())
            self.inventories[user] = path
        self.names: list[tuple[str, str]] = []

    def run(self, *words: str, user: str = "ada", hosts: str = "node1", task: str = "run") -> Ran:
        return self._skyfab(task, f"--inventory={self.inventories[user]}", f"--hosts={hosts}", *words)

    def start(self, name: str, *words: str, user: str = "ada", hosts: str = "node1") -> None:
        """Starts a detached run that ends when `go` is called with its name."""
        told = ("work.py", name, self.spot / "")
        ran = self.run("--when-free", "--detach", f"--name={name}", *words, *told, user=user, hosts=hosts)
        assert ran.code == 0, ran.err
        self.names.append((name, user))

    def find(self, name: str) -> Run:
        user = dict(self.names)[name]
        return sky.attach(name, inventory=self.inventories[user])

    def go(self, *names: str) -> None:
        for name in names:
            self.spot.leave(f"{name}.go")

    def waits(self, name: str, pattern: str) -> None:
        """Waits until a run waits, for this reason."""
        found = ""

        def is_so() -> bool:
            nonlocal found
            phase = self.find(name).phase
            found = f"{phase.phase}: {phase.text}" if phase else "none"
            return re.fullmatch(f"waiting: {pattern}", found) is not None

        try:
            until(is_so, timeout=60)
        except AssertionError:
            raise AssertionError(f"{name}: {found}\n{[*self.find(name).logs()]}") from None

    def runs(self, name: str, rank: int = 0) -> list[str]:
        """Waits until a run is running, and returns the GPUs that it had each time."""
        try:
            (found,) = self.spot.read(f"{name}.{rank}").values()
        except AssertionError:
            raise AssertionError(f"{name} does not run: {[*self.find(name).logs()]}") from None
        return found.split()

    def is_done(self, name: str) -> None:
        run = self.find(name)
        until(lambda: run.status != "running", f"{name} is done", 60)
        assert run.state == "done", [*run.logs()]

    def close(self) -> None:
        for name, _ in self.names:
            self.find(name).stop()


@pytest.fixture
def queue(skyfab: Skyfab, namespaces: Lab, tmp_path: Path) -> Iterator[Queue]:
    spot = Spot(namespaces.hosts)
    made = Queue(skyfab, namespaces, spot, tmp_path)
    yield made
    made.close()
    spot.close()


def test_a_run_waits_for_gpus_that_others_hold(queue: Queue, skyfab: Skyfab) -> None:
    queue.start("night", "--gpus=2")
    assert queue.runs("night") == ["0,1"]
    queue.start("second", "--gpus=1", user="root")
    queue.waits("second", r"1st, after ada's night \(node1, 2 GPUs, \d+ s so far\)")
    listed = skyfab("runs", f"--inventory={queue.inventories['root']}", "--hosts=node1").out
    assert re.search(r"waiting .* second +1st, after ada's night \(node1", listed), listed
    shown = skyfab("hosts", f"--inventory={queue.inventories['root']}", "--hosts=node1", "--json").out
    assert '"run": "night"' in shown
    assert '"user": "ada"' in shown
    assert "second.0" not in queue.spot.names()
    queue.go("night")
    queue.is_done("night")
    assert queue.runs("second") == ["0"]
    queue.go("second")
    queue.is_done("second")
    assert "done second True" in [line for _, _, line in queue.find("second").logs()]


def test_gangs_that_name_their_hosts_in_another_order_do_not_wait_for_each_other(queue: Queue) -> None:
    queue.start("first", "--gpus=2", hosts="node1")
    queue.runs("first")
    queue.start("one", "--gpus=2", hosts="node1,node2", user="ada")
    queue.waits("one", "1st, after ada's first .*")
    queue.start("other", "--gpus=2", hosts="node2,node1", user="root")
    queue.waits("other", "2nd, after ada's first .*")
    queue.go("first")
    assert [queue.runs("one", rank) for rank in range(4)] == [["0,1"]] * 4
    queue.waits("other", "1st, after ada's one .*")
    queue.go("one")
    queue.is_done("one")
    assert [queue.runs("other", rank) for rank in range(4)] == [["0,1"]] * 4
    queue.go("other")
    queue.is_done("other")


def test_a_waiting_run_can_be_stopped(queue: Queue) -> None:
    queue.start("night", "--gpus=2")
    queue.runs("night")
    queue.start("second", "--gpus=2", user="root")
    queue.waits("second", "1st, .*")
    queue.start("third")
    queue.waits("third", r"2nd, after ada's night \(node1, 2 GPUs, \d+ s so far\) and 1 more")
    run = queue.find("second")
    run.stop()
    assert run.status == "stopped"
    queue.waits("third", "1st, .*")
    queue.find("night").stop()
    assert queue.runs("third") == ["0,1"]


def kill_agent(host: LabHost, run: Run) -> None:
    """That of one of ada's runs."""
    folder = host.path("/home/ada/.cache/skyfab/runs") / run.id
    host.run(["kill", "-9", (folder / "agent").read_text().split()[0]])


def raised(run: Run) -> str:
    """What the ranks of a run have raised, on the hosts that respond."""
    with pytest.raises(sky.BroadcastError) as failed:
        run.raise_failure()
    return "\n".join(map(str, failed.value.exceptions))


def test_a_killed_agent_frees_its_place_and_its_gpus(queue: Queue, namespaces: Lab) -> None:
    """Its workers end with it."""
    queue.start("night", "--gpus=2")
    queue.runs("night")
    queue.start("second", "--gpus=2")
    queue.waits("second", "1st, .*")
    queue.start("third", "--gpus=2", user="root")
    queue.waits("third", "2nd, .*")
    for name in ("second", "night"):
        run = queue.find(name)
        kill_agent(namespaces["node1"], run)
        until(lambda run=run: run.status == "lost")
    assert queue.runs("third") == ["0,1"]


STUBBORN = """
trap '' TERM
echo $$ >SPOT/new.$RANK; mv SPOT/new.$RANK SPOT/held.$RANK
while :; do sleep 1; done
"""
AFTER = """
for pid in $(cat SPOT/held.*); do grep -s '^State:.*[RSD]' /proc/$pid/status; done >SPOT/seen.$RANK
mv SPOT/seen.$RANK SPOT/after.$RANK
sleep 600
"""


def test_gpus_are_free_only_when_all_ranks_of_the_host_are_gone(queue: Queue, namespaces: Lab) -> None:
    """Also if the process that has taken them is killed, and others ignore SIGTERM."""
    for name, script in (("gang", STUBBORN), ("after", AFTER)):
        words = ("--when-free", "--gpus=2", "--detach", f"--name={name}", "--", "sh", "-c")
        ran = queue.run(*words, script.replace("SPOT/", queue.spot / ""))
        assert ran.code == 0, ran.err
        queue.names.append((name, "ada"))
        if name == "gang":
            pids = [int(next(iter(queue.spot.read(f"held.{rank}").values()))) for rank in (0, 1)]
    queue.waits("after", r"1st, after ada's gang \(node1, 2 GPUs, \d+ s so far\)")
    host = namespaces["node1"]
    (leader,) = [one.ppid for one in host.processes() if one.pid == pids[0]]
    host.run(["kill", "-9", str(leader)])
    assert queue.spot.wait("after.0") == {"node1": ""}


def test_a_gang_that_loses_a_host_while_it_waits_frees_the_others(queue: Queue, namespaces: Lab) -> None:
    queue.start("night", hosts="node2")
    queue.runs("night")
    queue.start("gang", hosts="node1,node2")
    queue.waits("gang", "1st, after ada's night .*")
    queue.start("next", user="root")
    queue.waits("next", "1st, after ada's gang .*")
    run = queue.find("gang")
    kill_agent(namespaces["node2"], run)
    assert queue.runs("next") == ["0,1"]
    until(lambda: run.status != "running")
    assert re.search("while it waited for GPUs: rank [23] is gone", raised(run))


def test_low_priority_gives_way(queue: Queue) -> None:
    queue.start("low", "--gpus=2", "--priority=low", hosts="node1,node2")
    assert queue.runs("low", 2) == ["0,1"]
    queue.start("urgent", "--gpus=1", hosts="node2", user="root")
    assert queue.runs("urgent") == ["0"]
    assert queue.spot.notes("low.checkpoint") == {"node1": "saved saved ", "node2": "saved saved "}
    queue.waits("low", "1st, after root's urgent .*")
    assert queue.runs("low") == ["0,1"]
    queue.go("urgent")
    queue.is_done("urgent")
    until(lambda: queue.runs("low", 2) == ["0,1", "0,1"])
    queue.go("low")
    queue.is_done("low")


SERVER = """
echo $CUDA_VISIBLE_DEVICES >>served
[ $(wc -l <served) = 1 ] && exit 5
echo ready now
exec sleep 600
"""


def test_a_server_waits_for_gpus_keeps_them_when_it_restarts_and_gives_way(queue: Queue, namespaces: Lab) -> None:
    queue.start("night", "--gpus=1", user="root")
    queue.runs("night")
    refused = queue.run("chat", "--gpus=2", "--", "sleep", "600", task="serve")
    assert refused.code == 1
    assert "not enough free GPUs: in use by root's night" in refused.err
    words = ("--gpus=2", "--priority=low", "--ready=ready now", "--workdir=/tmp/chat", "--", "sh", "-c", SERVER)
    served = queue.run("chat", "--detach", *words, task="serve")
    assert served.code == 0, served.err
    queue.names.append(("chat", "ada"))
    queue.waits("chat", "1st, after root's night .*")
    queue.start("next", "--gpus=1", user="root")  # it goes first: its priority is normal
    queue.runs("next")
    queue.go("next", "night")

    def is_ready() -> bool:
        found = queue.find("chat").phase
        return found is not None and found.phase == "ready"

    def served_on() -> list[str]:
        return namespaces["node1"].path("/tmp/chat/served").read_text().split()

    until(is_ready, timeout=60)
    assert served_on() == ["0,1", "0,1"]  # it was restarted
    queue.start("urgent", "--gpus=1", user="root")
    queue.runs("urgent")
    queue.waits("chat", "1st, after root's urgent .*")
    queue.go("urgent")
    until(is_ready, timeout=60)
    assert served_on() == ["0,1"] * 3


def test_without_waiting_gpus_in_use_are_an_error(queue: Queue) -> None:
    queue.start("night", "--gpus=1", user="root")
    queue.runs("night")
    ran = queue.run("--gpus=2", "work.py", "x", "y", hosts="node1,node2")
    assert ran.code == 1
    who = r"in use by root's night \(node1, 1 GPU, \d+ s so far\)"
    assert re.search(rf"^error: node1\[\d\]: not enough free GPUs: {who}\n", ran.err, re.MULTILINE), ran.err
    few = "--where='gpus.free >= 2' --nodes=1"
    assert f"hint: to wait for them: --when-free; for any host that has them: {few}\n" in ran.err
    assert "waiting" not in ran.err
    ran = queue.run("--gpus=1", "--", "sh", "-c", "echo GPU $CUDA_VISIBLE_DEVICES by $CUDA_DEVICE_ORDER of {node}")
    assert (ran.code, ran.out.splitlines()) == (0, ["node1[0] GPU 1 by PCI_BUS_ID of 0"]), ran.err
