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
from skyfab.calls.call import Call, Function, Group, TakesCalls, as_function, as_group, not_a_call, not_a_function
from skyfab.calls.image import Image
from skyfab.calls.pack import PackedFunction, pack_arguments, pack_function
from skyfab.calls.project import Project
from skyfab.calls.refs import Ref, put
from skyfab.detached.run import Run, attach
from skyfab.errors import UsageError
from skyfab.files.transfer import Report
from skyfab.inventory.host import Host, variables
from skyfab.inventory.inventory import Inventory
from skyfab.plugins.base import Plugin, check_together
from skyfab.pool import open_pools
from skyfab.pool.broadcast import Broadcast
from skyfab.pool.cloud import refuses_rent
from skyfab.pool.detach import Detacher
from skyfab.pool.device_calls import DeviceCall
from skyfab.pool.devices import Devices
from skyfab.pool.fastpath import NOT_TAKEN, fastpath
from skyfab.pool.files import AnyPath, Files
from skyfab.pool.forward import Forward, Forwards
from skyfab.pool.futures import refuse_to_block, wait_for
from skyfab.pool.gang import GangCache
from skyfab.pool.gangs import Broadcasts
from skyfab.pool.host_choice import HostChoice
from skyfab.pool.images import HostImages
from skyfab.pool.map import MapCall
from skyfab.pool.node import Node
from skyfab.pool.nodes import Nodes, PoolOwner, close_all, named, open_all
from skyfab.pool.options import check_options
from skyfab.pool.project_sync import ProjectSync
from skyfab.pool.rendezvous import RendezvousFinder
from skyfab.pool.reprs import ShownPool, show
from skyfab.pool.scheduler import Scheduler, Task, slots_of, solo_spec
from skyfab.pool.stall import watch
from skyfab.pool.workdir import Workdirs, tell_files
from skyfab.protocol import codec
from skyfab.providers.base import Provider
from skyfab.session.fanout import meanwhile
from skyfab.session.sigint import SIGINT_GUARD
from skyfab.session.timing import Timing
from skyfab.ui import failure
from skyfab.ui.events import Events, HostState, emitting

if TYPE_CHECKING:
    import torch

    from skyfab.device.stream import DeviceStream

R = TypeVar("R")
T = TypeVar("T")


class Compute(ShownPool, TakesCalls):
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
        where: str | None = None,
        provider: Provider | None = None,
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

        `hosts` is a selection such as ``"gpu,!node3"``, or a list of names and hosts; None: all of the `inventory`,
        which is what `Inventory.of` takes (None: the one that is found). `where` is a condition on them, as in
        ``"gpu.memory >= 40GB and not busy"`` (docs/hosts.md). `nodes` takes the first so many of them. A `provider`,
        as in ``Container(nodes=2)``, makes the hosts when the pool is opened and removes them when it is closed.

        `ranks` is how many processes a broadcast has on each host; ``"auto"``: one for each GPU, or one. `image` is
        their environment, `plugins` what they are set up with, `env` further variables.

        `lease` is for how many seconds hosts and this program wait for a connection that is lost; a host that does not
        answer for `heartbeat_timeout` seconds while others do is lost. `timeout` is that of functions that have none.
        `ui` is how events are shown: live (``"rich"``), as lines (``"plain"``), not at all, or as it fits (``"auto"``).

        `workdir` is the working directory of functions. ``"auto"``: on a host, a persistent folder that corresponds to
        the current one here; on this machine, the current folder itself. Otherwise a path on the hosts, or ``"temp"``
        for a folder that is deleted with the pool.

        With ``results="data"`` hosts are not trusted: they may return plain data, numpy arrays and torch tensors, and
        nothing else is unpickled (docs/security.md).

        Raises InventoryError and UsageError for invalid arguments.
        """
        failure.install()
        check_options(ranks=ranks, lease=lease, heartbeat_timeout=heartbeat_timeout, results=results)
        self._choice = HostChoice(hosts, inventory, nodes=nodes, where=where, provider=provider)
        self.inventory, self.selected = self._choice.inventory, self._choice.listed
        self._image = image or Image()
        self._plugins = tuple(plugins)
        check_together(self._plugins)
        elastic = next((plugin.elastic for plugin in self._plugins if plugin.elastic), None)
        self._images = HostImages(self.selected, self._image, self._plugins)
        self._env = variables(env or {}, "env")
        self._lease, self._timeout, self._ui = lease, timeout, ui
        self.events = Events()
        self._sync = ProjectSync(Project(self._image))
        self._around, self._screen = contextlib.ExitStack(), contextlib.ExitStack()
        self._results, self._untrusted = results, results == "data"
        self._scheduler = Scheduler(self.events.call, untrusted=self._untrusted)
        # Does not reference the pool: threads hold this function, and must not keep a dropped pool alive.
        self._env_of = functools.partial(self._images.variables, self._env)
        self._pool = secrets.token_hex(8)  # prefix of the job names of its gangs
        self._gang_cache = GangCache(self._env_of, self._pool, RendezvousFinder.of(self._plugins, self.events))
        self._broadcasts = Broadcasts(self._gang_cache, ranks, elastic, self.events, untrusted=self._untrusted)
        self._nodes = Nodes(
            self._images,
            Workdirs(workdir),
            Timing(lease=lease, heartbeat_timeout=heartbeat_timeout),
            PoolOwner(self.events, self._gang_cache, self._scheduler),
            self._sync.take_back,
        )
        self._solo_spec = functools.partial(solo_spec, self._env_of, self._pool, self._nodes.count)
        self._devices = Devices(self._solo_spec, self._plugins, self.events, untrusted=self._untrusted)
        self.files = Files(self._solo_spec, self.events)
        self._forwards = Forwards(self.events)
        self._open = self._is_parents = False  # _is_parents is True in a forked child
        self.hosts: Sequence[Node] = ()  # once the pool is open

    # ---- opening and closing

    def __enter__(self) -> Compute:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def open(self) -> Compute:
        """Connects to all hosts in parallel; returns the pool. Raises the one failure, or a PoolError with all of them.

        Raises UsageError in a worker that is importing a module, and where pools are nested too deeply.
        """
        if self._open:
            return self
        if self._is_parents:
            raise open_pools.parents_pool()
        nesting.check()
        self._sync.begin()
        SIGINT_GUARD.watch()
        show(self.events, self._ui, self._lease, self._screen)
        self._screen.callback(self._choice.release)
        try:
            nodes = self._connect()
        except BaseException:
            self._sync.close()
            self._screen.close()
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
        return self

    def _connect(self) -> Sequence[Node]:
        self.selected = self._choice.choose(self.events)
        self.inventory = self._choice.inventory
        self._images.add(self.selected)
        nodes = self._nodes.make_nodes(self.selected, self.inventory)
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
            self._screen.close()

    def _leave(self) -> None:
        try:
            self._around.close()
            tell_files(self.hosts, self.inventory, self.events)
            self._nodes.recovery.close()
        finally:
            self._open = False
            open_pools.discard(self)
            self._forwards.close()
            self._devices.close()
            self._scheduler.fail_all()
            self._broadcasts.close()
            try:
                close_all(self.hosts)
            finally:
                SIGINT_GUARD.leave()
        for node in self.hosts:
            self.events.emit(HostState(host=node.name, state="closed"))

    # ---- running

    @property
    def world_size(self) -> int:
        """Number of ranks of a broadcast."""
        return sum(map(self._broadcasts.ranks_on, self.hosts))

    def run(self, call: Call[R]) -> R:
        """Runs a call on one worker and waits for it: ``call >> compute``."""
        if not self._open or not isinstance(call, Call):
            self._check_call(call)
        arguments = self._pack_arguments(call, None)
        if call.function.stall is not None or call.function.retries or not isinstance(arguments, codec.Payload):
            return wait_for(self.submit(call), self.hosts, self.events.waiting)
        function = self._pack_function(call.function)[0]
        timeout, label = self._timeout_of(call.function), call.function.label
        if emitting:
            refuse_to_block()
        with self.events.waiting:
            result: R = fastpath(self._scheduler, function, arguments, label=label, timeout=timeout)
        if result is NOT_TAKEN:
            self._scheduler.add(task := Task(function, arguments, label=label, timeout=timeout))
            result = wait_for(task.future, self.hosts, self.events.waiting)
        return result

    def broadcast(self, call: Call[R]) -> list[R]:
        """Runs a call on every rank and waits for all: ``call @ compute`` is a list in rank order.

        Raises BroadcastError if a rank fails; it has the results of the others.
        """
        future: Future[Any] = self.submit(call, on="all")
        results: list[R] = wait_for(future, self.hosts, self.events.waiting)
        return results

    def submit(self, call: Call[R], *, on: str = "one", keep: bool = False) -> Future[R]:
        """Starts a call: ``call > compute``. `on` is "one", "all", "head" or a host's name.

        Arrays and tensors are not copied: do not modify them until the future is done. If there are tensors of a remote
        device of that host among the arguments, the call runs in the worker of the device and has the tensors
        themselves. With `keep` it always runs in such a worker; the tensors of its result stay there, and the result
        has remote tensors (docs/remote_device.md). Raises NotPicklable for what cannot be pickled.
        """
        self._check_call(call)
        timeout = self._timeout_of(call.function)
        if on == "all":
            if keep:
                hint = "[compute.submit(call, on=host.name, keep=True) for host in compute.hosts]"
                raise UsageError("keep=True is for a call to one host, and this one is a broadcast", hint=hint)
            function, tree = self._pack_function(call.function)
            packed = (function, pack_arguments(call), tree)
            return self._broadcasts.submit(call.function, packed, self.hosts, timeout=timeout, pool=self)
        node = None if on == "one" else named(self.hosts, on)
        found = self._pack_arguments(call, node)
        task: Task | DeviceCall
        if keep or not isinstance(found, codec.Payload):
            tree = self._sync_tree()
            if isinstance(found, codec.Payload):
                found = self._devices.open(node or self.hosts[0], "auto", tree)
            task = self._devices.start(found, call, node, tree, timeout=timeout, keep=keep)
        else:
            function, _ = self._pack_function(call.function)
            label, retries = call.function.label, call.function.retries
            self._scheduler.add(task := Task(function, found, label=label, timeout=timeout, on=node, retries=retries))
        task.future.pool = self
        watch(task.future, task.places, call.function, self.events)
        return task.future

    def launch(self, call: Call[Any], *, on: str = "all", name: str | None = None) -> Run:
        """Starts a `call` that outlives this program: the hosts keep its output and result. `on` is as in `submit`.

        `name` is one to find it by, that of the function if none is given. It has workers of its own. Returns once the
        hosts have all they need; ``sky.attach(run.id)`` reconnects to it.
        """
        self._check_call(call)
        function, tree = self._pack_function(call.function)
        arguments = pack_arguments(call)
        chosen = self._broadcasts.available(self.hosts) if on == "all" else [named(self.hosts, on)]
        nodes = self._nodes.copies(chosen)
        ranks = [self._broadcasts.ranks_on(node) if on == "all" else 1 for node in chosen]
        label, timeout = call.function.label, self._timeout_of(call.function)
        detacher = Detacher(nodes, ranks, label=label, name=name or label)
        if on == "all":
            gang_cache = GangCache(self._env_of, detacher.id, RendezvousFinder.of(self._plugins, self.events))
            spec = self._broadcasts.spec(nodes, ranks, tree)
            broadcast = Broadcast(function=function, arguments=arguments, label=label, timeout=timeout)
            detacher.start_gang(lambda: gang_cache.current(spec), self._sync.tree, broadcast)
        else:
            detacher.start_one(
                lambda node: self._solo_spec(node, tree), self._sync.tree, function, arguments, timeout=timeout
            )
        return attach(detacher.id, [node.host for node in chosen], inventory=self.inventory, results=self._results)

    def detach(self, *, name: str | None = None) -> Run:
        """Detaches the running broadcast: it continues on the hosts as a run called `name`. Closes the pool."""
        self._check_open()
        call = self._broadcasts.at_work
        if call is None or call.gang is None:
            raise UsageError("no broadcast is under way", hint="submit(call, on='all') starts one; launch(call), a run")
        self._forwards.close()
        self._scheduler.fail_all()  # only this broadcast continues; queued calls would count as part of the run
        self._broadcasts.close()
        nodes, label = call.gang.nodes, call.broadcast.label
        ranks = [*map(self._broadcasts.ranks_on, nodes)]
        detacher = Detacher(nodes, ranks, label=label, name=name or label)
        detacher.take_over(call)
        self.close()
        return attach(detacher.id, [node.host for node in nodes], inventory=self.inventory, results=self._results)

    def wait_for_ranks(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until no rank runs a broadcast. Those of a cancelled one may take a moment."""
        self.hosts[0].session.wait(lambda: self._broadcasts.is_idle, timeout)

    def gather(self, *calls: Call[Any] | Group) -> tuple[Any, ...] | Iterator[Any]:
        """Runs `calls` in parallel: ``compute.gather(f(1), g(2))`` is ``(f(1) & g(2)) >> compute``."""
        return as_group(calls).results(self.submit)

    @overload
    def map(self, function: Function[..., R], *items: Iterable[Any]) -> list[R]: ...
    @overload
    def map(self, function: Callable[..., R], *items: Iterable[Any]) -> list[R]: ...
    def map(self, function: Any, *items: Iterable[Any]) -> list[Any]:
        """Applies `function` to each of `items`, balanced over all slots of all hosts. Results are in order.

        Short items are sent in groups. Raises the first failure, and cancels the rest.
        """
        self._check_open()
        if isinstance(function, Call):
            raise not_a_function(function)
        fn = as_function(function)
        calls = [fn(*arguments) for arguments in zip(*items, strict=False)]
        packed = self._pack_function(fn)[0]
        slots = sum(node.host.slots for node in self.hosts)
        told = self.events.progress(fn.label, len(calls))
        future = MapCall(self._scheduler, packed, calls, slots=slots, timeout=self._timeout_of(fn), told=told).start()
        return wait_for(future, self.hosts, self.events.waiting)

    def put(self, obj: T) -> Ref[T]:
        """A reference to pass to several calls in place of `obj`, which is sent to each host only once.

        The object is copied now: later changes, here or in a call, are not visible to other calls. Raises
        NotPicklable.
        """
        return put(obj)

    def upload(self, path: AnyPath, *, to: AnyPath | None = None, on: str = "all") -> list[Report]:
        """Copies the file or folder `path` to hosts, where `to` is relative to the working directory (docs/files.md).

        `on` is a host, "head" or "all". Without `to`, it has the same place there as in the current folder here. What
        is there already is not sent.
        """
        return self.files.upload(path, to, self._chosen(on))

    def download(self, path: AnyPath | Sequence[AnyPath], *, to: AnyPath = ".", on: str = "all") -> list[Report]:
        """Copies the files and folders of `path` from hosts into the folder `to`; it may have patterns: ``ckpt/*``.

        `on` is as in `upload`. From several hosts, each into a folder of the host's name.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        return self.files.download(paths, to, self._chosen(on), apart=on == "all" and len(self.hosts) > 1)

    def _chosen(self, on: str) -> Sequence[Node]:
        self._check_open()
        return self.hosts if on == "all" else [named(self.hosts, on)]

    def forward(self, port: int | str, *, on: str = "head", local: int | None = None) -> Forward:
        """Makes a port of a host one of 127.0.0.1 on this machine, until the pool is closed (docs/forward.md).

        `port` is one of the host itself, or ``"name:port"`` of a machine that it can connect to. `on` is a host, or
        "head". `local` is the port on this machine; None: the same one if it is free, else any; 0: any.
        """
        self._check_open()
        return self._forwards.open(named(self.hosts, on).host, self.inventory, port, local)

    def device(self, kind: str = "auto", *, on: str | None = None) -> torch.device:
        """A device of a host as a `torch.device`: tensors and modules work on it unmodified.

        `kind`: "cuda", "cuda:1", "cpu", or "auto" for the first GPU or else the CPU. `on`: a host, or else the first.
        """
        self._check_open()
        return self._devices.open(named(self.hosts, on or "head"), kind, self._sync_tree()).torch_device

    def _check_call(self, call: Call[Any]) -> None:
        if not isinstance(call, Call):
            raise not_a_call(call)
        self._check_open()

    def _pack_arguments(self, call: Call[Any], node: Node | None) -> codec.Payload | DeviceStream:
        """The packed arguments; or the device in whose worker the call must run to have its tensors themselves."""
        return self._devices.find(call, node) if self._devices.streams else pack_arguments(call)

    def _pack_function(self, function: Function[..., Any]) -> tuple[PackedFunction, str]:
        """The packed function, and the digest of the project tree, which every host has by then."""
        return pack_function(function, self._plugins), self._sync_tree()

    def _timeout_of(self, function: Function[..., Any]) -> float | None:
        return self._timeout if function.timeout is None else function.timeout

    # ---- internals

    def leave_to_parent(self) -> None:
        """In a forked child: the connections belong to the parent process, and must not be used here."""
        self._open, self._is_parents = False, True
        self._forwards.leave_to_parent()

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
