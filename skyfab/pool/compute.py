"""`Compute`: the user's interface to a pool of hosts. Opens connections, runs calls, closes everything again."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from skyfab.calls import nesting
from skyfab.calls.call import Call, Function, Group, as_function
from skyfab.calls.image import Image
from skyfab.calls.pack import PackedFunction, pack_arguments, pack_function
from skyfab.calls.project import Project
from skyfab.calls.refs import Ref, put
from skyfab.calls.results import in_order
from skyfab.detached.run import Run, attach
from skyfab.errors import UsageError
from skyfab.files.transfer import Report
from skyfab.inventory.host import Host, variables
from skyfab.inventory.inventory import Inventory
from skyfab.plugins.base import Plugin, check_together
from skyfab.pool import open_pools
from skyfab.pool.broadcast import Broadcast, BroadcastQueue, GangCall, may_go_on, retry
from skyfab.pool.cloud import refuses_rent
from skyfab.pool.detach import Detacher
from skyfab.pool.devices import Devices
from skyfab.pool.fastpath import NOT_TAKEN, fastpath
from skyfab.pool.files import AnyPath, Files
from skyfab.pool.futures import CallFuture, refuse_to_block, wait_for
from skyfab.pool.gang import GangCache, GangSpec, remaining
from skyfab.pool.images import HostImages
from skyfab.pool.map import MapCall
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes, PoolOwner, close_all, named, open_all
from skyfab.pool.options import check_options
from skyfab.pool.project_sync import ProjectSync
from skyfab.pool.rendezvous import RendezvousFinder
from skyfab.pool.scheduler import Scheduler, Task, slots_of, solo_spec
from skyfab.pool.stall import Place, watch
from skyfab.pool.workdir import Workdirs, tell_files
from skyfab.protocol import codec
from skyfab.session.fanout import meanwhile
from skyfab.session.sigint import SIGINT_GUARD
from skyfab.session.timing import Timing
from skyfab.ui.events import Events, HostState, emitting

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
T = TypeVar("T")


class Compute:
    """A pool of hosts. Opened by ``with``; on closing, all of its processes on the hosts are terminated.

    >>> with Compute("local") as compute:
    ...     compute.run(as_function(len)("four"))
    4
    """

    @refuses_rent
    def __init__(
        self,
        hosts: str | Iterable[str | Host] | None = None,
        *,
        inventory: str | os.PathLike[str] | Inventory | None = None,
        nodes: int | None = None,
        ranks: int | Literal["auto"] = "auto",
        image: Image | None = None,
        plugins: Sequence[Plugin] = (),
        env: Mapping[str, str] | None = None,
        workdir: str | os.PathLike[str] = "auto",
        lease: float = 60,
        heartbeat_timeout: float = 10,
        timeout: float | None = None,
        results: Literal["any", "data"] = "any",
        ui: Literal["auto", "rich", "plain", "none"] = "auto",
    ) -> None:
        """Does not connect yet: that happens when the pool is entered.

        `workdir` is the working directory of functions. ``"auto"``: on a host, a persistent folder that corresponds to
        the current one here; on this machine, the current folder itself. Otherwise a path on the hosts, or ``"temp"``
        for a folder that is deleted with the pool.

        With ``results="data"`` hosts are not trusted: they may return plain data, numpy arrays and torch tensors, and
        nothing else is unpickled (docs/security.md).

        Raises InventoryError and UsageError for invalid arguments.
        """
        check_options(ranks=ranks, lease=lease, heartbeat_timeout=heartbeat_timeout, results=results)
        self.inventory = Inventory.of(inventory)
        self.selected = self.inventory.select(hosts, nodes=nodes)
        """The selected hosts."""
        self._image = image or Image()
        self._plugins = tuple(plugins)
        check_together(self._plugins)
        self._elastic = next((plugin.elastic for plugin in self._plugins if plugin.elastic), None)
        self._images = HostImages(self.selected, self._image, self._plugins)
        self._ranks = ranks
        self._env = variables(env or {}, "env")
        self._lease = lease
        self._timeout = timeout
        self._ui = ui
        self.events = Events()
        self._sync = ProjectSync(Project(self._image))
        self._around = contextlib.ExitStack()
        self._results, self._untrusted = results, results == "data"
        self._scheduler = Scheduler(self.events.call, untrusted=self._untrusted)
        # Does not reference the pool: threads hold this function, and must not keep a dropped pool alive.
        self._env_of = functools.partial(self._images.variables, self._env)
        self._pool = secrets.token_hex(8)  # prefix of the job names of its gangs
        self._gang_cache = GangCache(self._env_of, self._pool, RendezvousFinder.of(self._plugins, self.events))
        self._broadcasts = BroadcastQueue()
        self._nodes = Nodes(
            self.inventory,
            self._images,
            Workdirs(workdir),
            Timing(lease=lease, heartbeat_timeout=heartbeat_timeout),
            PoolOwner(self.events, self._gang_cache, self._scheduler),
            self._sync.take_back,
        )
        self._solo_spec = functools.partial(solo_spec, self._env_of, self._pool, len(self.selected))
        self._devices = Devices(self._solo_spec)
        self.files = Files(self._solo_spec, self.events)
        self._open = False
        self._is_parents = False  # in a forked child it is True: the pool belongs to the parent process
        self._closers: list[Callable[[], None]] = []
        self.hosts: Sequence[Node] = ()  # once the pool is open

    # ---- opening and closing

    def __enter__(self) -> Compute:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def open(self) -> None:
        """Connects to all hosts in parallel. Raises the one failure, or a PoolError with all of them.

        Raises UsageError in a worker that is importing a module, and where pools are nested too deeply.
        """
        if self._open:
            return
        if self._is_parents:
            raise open_pools.parents_pool()
        nesting.check()
        self._sync.begin()
        SIGINT_GUARD.watch()
        self._show()
        try:
            nodes = self._connect()
        except BaseException:
            self._sync.close()
            self._hide()
            SIGINT_GUARD.leave()
            raise
        self.hosts = tuple(nodes)
        for node in nodes:
            node.open_device = weakref.WeakMethod(self.device)
        self._scheduler.open(slots_of(nodes, self._solo_spec))
        self._broadcasts.open()
        self._sync.open(self.hosts)
        self._open = True
        open_pools.add(self)
        try:
            for plugin in self._plugins:
                self._around.enter_context(plugin.around_client(self))
        except BaseException:
            self.close()
            raise

    def _connect(self) -> Sequence[Node]:
        nodes = self._nodes.make_nodes(self.selected)
        with meanwhile(self._sync.read_ahead):
            open_all(nodes, self.events, failed=lambda node: self._images.failed(node.host))
        return nodes

    def close(self) -> None:
        """Terminates all processes of the pool on all hosts. Does nothing in a forked child: the parent owns it."""
        if self._is_parents:
            return
        refuse_to_block()
        try:
            if self._open:
                self._leave()
            else:
                close_all(self._nodes.all)  # stops another thread that may be connecting
        finally:
            self._sync.close()
            self._hide()

    def _leave(self) -> None:
        try:
            self._around.close()
            tell_files(self.hosts, self.inventory, self.events)
            self._nodes.recovery.close()
        finally:
            self._open = False
            open_pools.discard(self)
            self._devices.close()
            self._scheduler.fail_all()
            self._broadcasts.close()
            try:
                close_all(self.hosts)
            finally:
                SIGINT_GUARD.leave()
        for node in self.hosts:
            self.events.emit(HostState(host=node.name, state="closed"))

    def _show(self) -> None:
        if self._ui != "none":
            from skyfab.ui.screen import attach

            self._closers.append(attach(self.events, self._ui, timeout=self._lease / 4))

    def _hide(self) -> None:
        while self._closers:
            self._closers.pop()()

    # ---- running

    @property
    def world_size(self) -> int:
        """Number of ranks of a broadcast."""
        return sum(self._ranks_on(node) for node in self.hosts)

    def _ranks_on(self, node: Node) -> int:
        return self._ranks if self._ranks != "auto" else max(1, len(node.gpus))

    def run(self, call: Call[R]) -> R:
        """Runs a call on one worker and waits for it: ``call >> compute``."""
        function, arguments, _ = self._pack(call)
        if call.function.stall is not None or call.function.retries:
            return wait_for(self.submit(call))
        timeout, label = self._timeout_of(call.function), call.function.label
        if emitting:
            refuse_to_block()
        result: R = fastpath(self._scheduler, function, arguments, label=label, timeout=timeout)
        if result is NOT_TAKEN:
            task = Task(function, arguments, label=label, timeout=timeout)
            self._scheduler.add(task)
            result = wait_for(task.future)
        return result

    def broadcast(self, call: Call[R]) -> list[R]:
        """Runs a call on every rank and waits for all: ``call @ compute`` is a list in rank order.

        Raises BroadcastError if a rank fails; it has the results of the others.
        """
        future: Future[Any] = self.submit(call, on="all")
        results: list[R] = wait_for(future)
        return results

    def submit(self, call: Call[R], *, on: str = "one") -> Future[R]:
        """Starts a call: ``call > compute``. `on` is "one", "all", "head" or a host's name.

        Arrays and tensors are not copied: do not modify them until the future is done. Raises NotPicklable for a
        function or argument that cannot be pickled.
        """
        function, arguments, tree = self._pack(call)
        timeout, label = self._timeout_of(call.function), call.function.label
        if on == "all":
            elastic = self._elastic
            broadcast = Broadcast(
                function=function,
                arguments=arguments,
                label=label,
                timeout=timeout,
                min_hosts=None if elastic is None else elastic.min_hosts,
                untrusted=self._untrusted,
            )
            jobs: list[str] = []

            def start(attempt: int) -> CallFuture:
                begun = self._broadcasts.add(broadcast, lambda call: self._begin_broadcast(call, tree, attempt, jobs))
                begun.future.pool = self
                self._watch(call.function, begun.future, begun.places)
                return begun.future

            retries = call.function.retries
            if elastic is not None:
                return retry(start, lambda error, number: may_go_on(error, number, elastic, retries), in_order)
            return retry(start, lambda _, number: number < retries) if retries else start(0)
        node = None if on == "one" else named(self.hosts, on)
        task = Task(function, arguments, label=label, timeout=timeout, on=node, retries=call.function.retries)
        task.future.pool = self
        self._scheduler.add(task)
        self._watch(call.function, task.future, task.places)
        return task.future

    def _begin_broadcast(self, call: GangCall, tree: str, attempt: int, jobs: list[str]) -> None:
        """Sends a broadcast to the ranks of the available hosts. Raises their errors.

        `jobs` keeps the job's name across attempts, so that a retry finds what an earlier attempt saved under it.
        """
        nodes = self.hosts if self._elastic is None else remaining(self.hosts, self._elastic)
        spec = self._gang_spec(nodes, map(self._ranks_on, nodes), tree, attempt)
        gang = self._gang_cache.current(spec, job=jobs[0] if jobs else None)
        jobs.append(gang.job)
        with SIGINT_GUARD:
            call.begin(gang, self.events.call(call.broadcast.label, *(node.name for node in nodes)))

    def _gang_spec(self, nodes: Sequence[Node], ranks: Iterable[int], tree: str, attempt: int = 0) -> GangSpec:
        elastic = self._elastic is not None
        return GangSpec(nodes=tuple(nodes), ranks=tuple(ranks), tree=tree, attempt=attempt, elastic_agents=elastic)

    def _watch(self, function: Function[..., Any], future: CallFuture, places: Callable[[], Sequence[Place]]) -> None:
        if function.stall is not None:
            watch(future, places, function.stall, function.label, self.events)

    def launch(self, call: Call[Any], *, on: str = "all", name: str | None = None) -> Run:
        """Starts a call that outlives this program: the hosts keep its output and result. `on` is as in `submit`.

        It has workers of its own. Returns once the hosts have all they need; ``sky.attach(run.id)`` reconnects to it.
        """
        function, arguments, tree = self._pack(call)
        chosen = self._chosen(on)
        if on == "all" and self._elastic is not None:
            chosen = remaining(chosen, self._elastic)
        nodes = self._nodes.copies(chosen)
        ranks = [self._ranks_on(node) if on == "all" else 1 for node in chosen]
        label, timeout = call.function.label, self._timeout_of(call.function)
        detacher = Detacher(nodes, ranks, label=label, name=name or label)
        if on == "all":
            gang_cache = GangCache(self._env_of, detacher.id, RendezvousFinder.of(self._plugins, self.events))
            spec = self._gang_spec(nodes, ranks, tree)
            broadcast = Broadcast(function=function, arguments=arguments, label=label, timeout=timeout)
            detacher.start_gang(lambda: gang_cache.current(spec), self._sync.tree, broadcast)
        else:
            detacher.start_one(
                lambda node: self._solo_spec(node, tree), self._sync.tree, function, arguments, timeout=timeout
            )
        return attach(detacher.id, [node.host for node in chosen], inventory=self.inventory, results=self._results)

    def detach(self, *, name: str | None = None) -> Run:
        """Detaches the running broadcast: it continues on the hosts when this program ends. Closes the pool."""
        self._check_open()
        call = self._broadcasts.at_work
        if call is None or call.gang is None:
            raise UsageError("no broadcast is under way", hint="submit(call, on='all') starts one; launch(call), a run")
        self._scheduler.fail_all()  # only this broadcast continues; queued calls would count as part of the run
        self._broadcasts.close()
        nodes, label = call.gang.nodes, call.broadcast.label
        detacher = Detacher(nodes, [self._ranks_on(node) for node in nodes], label=label, name=name or label)
        detacher.take_over(call)
        self.close()
        return attach(detacher.id, [node.host for node in nodes], inventory=self.inventory, results=self._results)

    def gather(self, group: Group) -> tuple[Any, ...] | Iterator[Any]:
        """Runs calls in parallel: ``(f(1) & g(2)) >> compute``."""
        return group.results([self.submit(call) for call in group.calls])

    @overload
    def map(self, function: Function[..., R], *items: Iterable[Any]) -> list[R]: ...
    @overload
    def map(self, function: Callable[..., R], *items: Iterable[Any]) -> list[R]: ...
    def map(self, function: Any, *items: Iterable[Any]) -> list[Any]:
        """Applies a function to every item, balanced over all slots of all hosts. Results are in order.

        Short items are sent in groups. Raises the first failure, and cancels the rest.
        """
        self._check_open()
        fn = as_function(function)
        calls = [fn(*arguments) for arguments in zip(*items, strict=False)]
        packed = pack_function(fn, self._plugins)
        self._sync_tree()
        slots = sum(node.host.slots for node in self.hosts)
        future = MapCall(self._scheduler, packed, calls, slots=slots, timeout=self._timeout_of(fn)).start()
        return wait_for(future)

    def put(self, obj: T) -> Ref[T]:
        """A reference to pass to several calls in place of the object, which is sent to each host only once.

        The object is copied now: later changes, here or in a call, are not visible to other calls. Raises
        NotPicklable.
        """
        return put(obj)

    def upload(self, path: AnyPath, *, to: AnyPath | None = None, on: str = "all") -> list[Report]:
        """Copies a file or folder to hosts, where `to` is relative to the working directory (docs/files.md).

        Without `to`, it has the same place there as in the current folder here. What is there already is not sent.
        """
        return self.files.upload(path, to, self._chosen(on))

    def download(self, path: AnyPath | Sequence[AnyPath], *, to: AnyPath = ".", on: str = "all") -> list[Report]:
        """Copies files and folders from hosts into the folder `to`; patterns such as ``ckpt/*`` are allowed.

        From several hosts, each into a folder of the host's name.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        return self.files.download(paths, to, self._chosen(on), apart=on == "all" and len(self.hosts) > 1)

    def _chosen(self, on: str) -> Sequence[Node]:
        self._check_open()
        return self.hosts if on == "all" else [named(self.hosts, on)]

    def device(self, kind: str = "auto", *, on: str | None = None) -> torch.device:
        """A device of a host as a `torch.device`: tensors and modules work on it unmodified.

        `kind`: "cuda", "cuda:1", "cpu", or "auto" for the first GPU or else the CPU. `on`: a host, or else the first.
        """
        self._check_open()
        return self._devices.open(named(self.hosts, on or "head"), kind, self._sync_tree())

    def _pack(self, call: Call[Any]) -> tuple[PackedFunction, codec.Payload, str]:
        """The packed function, its arguments, and the digest of the project tree, which every host has by then."""
        if not isinstance(call, Call):
            raise UsageError(f"{call!r:.80} is not a call", hint="decorate the function with @sky.function and call it")
        if not self._open:
            self._check_open()
        return pack_function(call.function, self._plugins), pack_arguments(call), self._sync_tree()

    def _timeout_of(self, function: Function[..., Any]) -> float | None:
        return self._timeout if function.timeout is None else function.timeout

    # ---- internals

    def leave_to_parent(self) -> None:
        """In a forked child: the connections belong to the parent process, and must not be used here."""
        self._open, self._is_parents = False, True

    def _check_open(self) -> None:
        if self._is_parents:
            raise open_pools.parents_pool()
        if not self._open:
            raise UsageError("the pool is not open", hint="with sky.Compute(…) as compute: …")

    def _sync_tree(self) -> str:
        """Syncs the project's files to every host; returns the tree's digest."""
        return self._sync.digest(self._replan)

    def _replan(self, tree: str) -> None:
        """Later calls need workers that import the new code."""
        self._scheduler.replan(lambda slot: self._solo_spec(slot.node, tree))

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            open_pools.close_dropped(self, [node.name for node in self.hosts])
