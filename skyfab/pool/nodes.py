"""The roster: the nodes of a pool, how each is talked to, and those that come back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.gangs import Gangs
from skyfab.pool.hearing import Hearing, Progress
from skyfab.pool.images import Outfit
from skyfab.pool.node import Node
from skyfab.pool.recovery import Homecoming, Welcome
from skyfab.pool.rendezvous import Meetings
from skyfab.pool.scheduler import Queue
from skyfab.pool.workdir import Workdirs
from skyfab.session.bootstrap import Launch
from skyfab.session.bundle import bundle
from skyfab.session.reader import SharedReader
from skyfab.session.session import Session
from skyfab.session.transport import transport_for
from skyfab.session.timing import Timing
from skyfab.ui.events import Events


class Roster:
    """Makes nodes. They are not open yet, and `nodes` are those of the pool itself."""

    def __init__(
        self,
        inventory: Inventory,
        outfit: Outfit,
        events: Events,
        gangs: Gangs,
        queue: Queue,
        *,
        timing: Timing,
        welcome: Welcome,
        workdirs: Workdirs,
    ) -> None:
        """`welcome` is called with a lost node that is there again, and with what lets calls go to it."""
        self._workdirs = workdirs
        self._inventory = inventory
        self._outfit = outfit
        self._events = events
        self._gangs = gangs
        self._queue = queue
        self._timing = timing
        self._reader = SharedReader()
        self.pool = ""
        """The pool's name on its hosts."""
        self._listeners: dict[int, Hearing] = {}
        self.homecoming = Homecoming(lambda node: self._talk(node, self._listeners[node.index]), welcome, events)
        self.nodes: Sequence[Node] = ()

    def call_up(self, hosts: Sequence[Host]) -> Sequence[Node]:
        """The nodes of the pool, one for each host."""
        self._outfit.begin()
        self.pool = secrets.token_hex(8)  # a new name: agents of the last opening may still be about to end
        self.nodes = [self._recruit(index, host) for index, host in enumerate(hosts)]
        self.homecoming.begin()
        return self.nodes

    def _recruit(self, index: int, host: Host) -> Node:
        listener = Hearing(self._events, self._gangs, self._queue, self.homecoming, lambda: self.nodes)
        node = listener.node = Node(index, host, self._inventory)
        node.workdir = self._workdirs.of(host)
        node.session = self._talk(node, listener, pool=self.pool)
        self._listeners[index] = listener
        return node

    def apart(self, nodes: Sequence[Node], env: Callable[[Node], Mapping[str, str]]) -> list[Node]:
        """The same hosts once more, with agents of their own. These have one name on all hosts, as a pool's have."""
        pool = secrets.token_hex(8)
        return [self._apart(node, env, pool) for node in nodes]

    def _apart(self, node: Node, env: Callable[[Node], Mapping[str, str]], pool: str) -> Node:
        listener = Hearing(Events(), Gangs(env, pool, Meetings()), self._queue, None, lambda: ())
        made = listener.node = Node(node.index, node.host, self._inventory)
        made.workdir = node.workdir
        made.session = self._talk(made, listener, pool=pool)
        return made

    def _talk(self, node: Node, listener: Hearing, *, pool: str | None = None) -> Session:
        """A session with an agent that nobody has talked to before."""
        host = node.host
        name = f"{pool or secrets.token_hex(8)}-{node.index}"  # two names may be one machine
        python, prepare = self._outfit.interpreter(host, name, Progress(self._events, host.name))
        return Session(
            Launch(host=host, session=name, bundle=bundle(), python=python, prepare=prepare),
            lambda: transport_for(host, self._inventory),
            listener,
            self._reader,
            self._timing,
        )
