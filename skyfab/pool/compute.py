"""`Compute`: the user's interface to a pool of hosts. Opens connections, runs calls, closes everything again."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar, overload

from skyfab._util.html import ShownAsTable
from skyfab._util.signals import SIGNAL_GUARD, without_signals
from skyfab.calls import nesting
from skyfab.calls.call import (
    Call,
    Errors,
    Function,
    Group,
    as_function,
    as_group,
    check_errors,
    check_seconds,
    not_a_call,
)
from skyfab.calls.image import Image
from skyfab.calls.pack import PackedCall, collect, pack_function, pack_streams, sources_of
from skyfab.calls.project import Project
from skyfab.calls.refs import Ref, put
from skyfab.calls.stream import Stream
from skyfab.detached.find import attach, runs
from skyfab.detached.noted import note_used
from skyfab.detached.run import Run
from skyfab.errors import UsageError
from skyfab.files.transfer import Report
from skyfab.host.agent.actors import construct
from skyfab.host.collected import Naming, assembled, take_kept
from skyfab.inventory.host import MOST_SLOTS, Host
from skyfab.inventory.inventory import Inventory
from skyfab.plugins.base import Plugin
from skyfab.pool import compiled
from skyfab.pool.actor import Limits
from skyfab.pool.broadcasts import Broadcasts
from skyfab.pool.detach import Detacher
from skyfab.pool.devices import DeviceCall, Devices, call_that_stays
from skyfab.pool.files import AnyPath, Files
from skyfab.pool.forward import Forward, Forwards
from skyfab.pool.futures import CallFuture, refuse_to_block, wait_for
from skyfab.pool.handles import Actors, Handle
from skyfab.pool.host_choice import HostChoice
from skyfab.pool.images import HostImages
from skyfab.pool.map import MapCall
from skyfab.pool.node import TABLE, Node
from skyfab.pool.nodes import Nodes, named, open_all, tell_files
from skyfab.pool.package_relay import deliver
from skyfab.pool.project_sync import ProjectSync
from skyfab.pool.relay import Relay
from skyfab.pool.rendezvous import peer_addresses
from skyfab.pool.scheduler import NOT_TAKEN, Scheduler
from skyfab.pool.stall import watch
from skyfab.pool.streams import RemoteIterator
from skyfab.pool.task import Task
from skyfab.pool.workdir import Workdirs
from skyfab.protocol import codec
from skyfab.providers.base import Provider
from skyfab.session.ask import Asker
from skyfab.session.timing import Timing
from skyfab.ui import failure
from skyfab.ui.display import attach as attach_view
from skyfab.ui.events import Events, HostState, emitting

if TYPE_CHECKING:
    import distributed
    import optuna
    import torch

    from skyfab.device.stream import DeviceStream
    from skyfab.engines.executor import PoolExecutor
    from skyfab.engines.ray import RayCluster
    from skyfab.pool.fetch import Fetched
    from skyfab.pool.mirror import Mirror

R = TypeVar("R")
T = TypeVar("T")
_Items = Iterable[Any]
_Gpus = float | None
"""How many GPUs a call has for itself, or which share of one; None: as its function says."""


_ELASTIC: Final = 10.0
"""Seconds without a heartbeat after which an elastic gang continues without the host, while others respond."""
_open_pools: Final[weakref.WeakSet[Compute]] = weakref.WeakSet()
"""Those of this process."""


class Compute(ShownAsTable):
    """A pool of hosts. Use it in a ``with`` block: at its end, all of the pool's processes on the hosts are stopped.

    >>> import skyfab as sky
    >>> with sky.Compute("local") as compute:
    ...     sky.function(len)("four") >> compute
    4
    """

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
        slots: int | None = None,
        gpus: Literal["auto", "free"] = "auto",
        workdir: str | os.PathLike[str] = "auto",
        lease: float = 60,
        heartbeat_timeout: float | None = None,
        timeout: float | None = None,
        results: Literal["any", "data"] = "any",
        ui: Literal["auto", "rich", "plain", "none"] = "auto",
    ) -> None:
        """Does not connect yet: ``with`` or `open` does.

        `hosts` is a selection such as ``"gpu,!node3"``, or a list of names and hosts; None: all of the `inventory`,
        as for `Inventory.of` (None: the default one). `where` is a condition such as
        ``"gpu.memory >= 40GB and not busy"`` (docs/hosts.md). `nodes` is the number of hosts to use. A `provider` such
        as ``Container(nodes=2)`` creates the hosts when the pool is opened and removes them when it is closed.

        `ranks` is the number of processes of a broadcast on each host; ``"auto"``: one for each GPU, or one. `image` is
        their environment, `plugins` set them up, `env` has further variables. `slots` is the number of solo calls
        that run at a time on each host (None: the inventory's, which is 1 by default). With ``gpus="free"`` the pool
        takes all GPUs of its hosts that nobody uses, and holds them until it is closed.

        `lease` is how many seconds hosts and this program wait for a lost connection. A host that does not respond for
        `heartbeat_timeout` seconds while others do is lost sooner (None: 10 for elastic gangs, else it is not).
        `timeout` is the default for functions. `ui` is how events are shown: live (``"rich"``), as lines (``"plain"``),
        not at all (``"none"``), or the best choice (``"auto"``).

        `workdir` is the working folder of functions. ``"auto"``: on a host, a persistent folder that corresponds to the
        current folder of this program; on this machine, the current folder itself. Otherwise a path on the hosts, or
        ``"temp"`` for a folder that is deleted with the pool.

        With ``results="data"`` hosts are not trusted: they may return plain data, numpy arrays and torch tensors, and
        nothing is unpickled (docs/security.md).

        Raises InventoryError and UsageError for invalid arguments.
        """
        failure.install()
        seconds = {"lease": lease, "heartbeat_timeout": heartbeat_timeout, "timeout": timeout}
        _check_options(ranks=ranks, slots=slots, gpus=gpus, seconds=seconds, results=results, ui=ui)
        untrusted = results == "data"
        self.events = Events()
        self.hosts: Sequence[Node] = ()  # once the pool is open
        self._choice = HostChoice(hosts, inventory, nodes=nodes, where=where, provider=provider)
        self._timeout, self._results, self._ui, self._gpus = timeout, results, ui, gpus
        self._images = HostImages(self._choice.listed, image or Image(), plugins, env)
        self._sync = ProjectSync(Project(image or Image()))
        self._scheduler = Scheduler(self.events.call, slots=slots, untrusted=untrusted)
        patience = _ELASTIC if any(plugin.elastic for plugin in self._images.plugins) else float("inf")
        timing = Timing(lease=lease, heartbeat_timeout=heartbeat_timeout or patience)
        self._nodes = Nodes(self._images, Workdirs(workdir), timing, self.events, self._scheduler, self._sync)
        self._broadcasts = Broadcasts(self._images, ranks, self._nodes.job, timing, self.events, untrusted=untrusted)
        self._devices = Devices(self._nodes.solo_spec, self._images.plugins, self.events, untrusted=untrusted)
        self._sync_tree = functools.partial(self._sync.digest, self._scheduler.use_tree)
        """Syncs the project's files to every host; returns the tree's digest."""
        self._actors = Actors(
            self._scheduler.gpus, self._images.plugins, self.events, self._sync_tree, untrusted=untrusted
        )
        self.relay = self._broadcasts.relay = self._sync.relay = Relay(self._nodes.solo_spec, self.events)
        self.files = Files(self._nodes.solo_spec, self.relay)
        self._images.deliver = functools.partial(deliver, self._nodes, self.relay)
        self._forwards = Forwards(self.events)
        self._mirrors: set[Mirror] = set()
        self._collecting = threading.RLock()  # reentrant: a signal handler may make such a call
        """Held from a call with ``collect="head"`` until its results are here: ranks keep those of the last one."""
        self._around, self._closing = contextlib.ExitStack(), contextlib.ExitStack()
        self._open = self._is_parents = False  # _is_parents is True in a forked child
        self._has_same_gpus = False  # its workers see the GPUs that this program sees

    @property
    def inventory(self) -> Inventory:
        """The inventory from which hosts are selected; with a provider, only available while the pool is open."""
        return self._choice.inventory

    @property
    def selected(self) -> Sequence[Host]:
        """The hosts of the pool; before it is opened, those that it may use."""
        return [node.host for node in self.hosts] or self._choice.listed

    @property
    def is_open(self) -> bool:
        """Whether calls can be made: from `open` to `close`."""
        return self._open

    def __repr__(self) -> str:
        hosts = self.selected
        names = ", ".join(host.name for host in hosts[:8]) + (", …" if len(hosts) > 8 else "")
        return f"<Compute {names or 'of a provider'}: {'open' if self._open else 'not open'}>"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        if self._open:
            return TABLE, [node.row for node in self.hosts]
        return TABLE, [(host.name, host.login, "–", "–", "–", "not connected") for host in self.selected]

    # ---- opening and closing

    def __enter__(self) -> Compute:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    def open(self) -> Compute:
        """Connects to all hosts in parallel; returns the pool. Raises the error of a host, or PoolError for several.

        Raises UsageError in a worker that is importing a module, and where pools are nested too deeply.
        """
        if self._open:
            return self
        if self._is_parents:
            raise _parents_pool()
        nesting.check()
        self._sync.begin()
        try:
            with contextlib.ExitStack() as opened:
                with SIGNAL_GUARD:  # a handler that raised between these would leave the program's handlers wrapped
                    SIGNAL_GUARD.watch()
                    opened.callback(SIGNAL_GUARD.leave)
                if self._ui != "none":
                    opened.callback(attach_view(self.events, self._ui, timeout=self._nodes.timing.lease / 4))
                opened.callback(self._choice.release)
                opened.callback(self._sync.close)
                opened.callback(self._nodes.close)
                opened.callback(self._nodes.recovery.close)  # a host may be lost before another one fails
                self._use(self._connect())
                with SIGNAL_GUARD:  # from now on `close` ends all
                    self._open = True
                    _open_pools.add(self)
                    self._closing = opened.pop_all()
            for plugin in self._images.plugins:
                self._around.enter_context(plugin.around_client(self))
            if self._results == "any":  # kernels are code
                self._around.enter_context(compiled.shared(self.hosts, self._nodes.solo_spec, self.events))
        except BaseException:
            if self._open:
                self.close()
            raise
        return self

    def _use(self, nodes: Sequence[Node]) -> None:
        """Has calls run on these nodes, which are open."""
        self.hosts = tuple(nodes)
        for node in nodes:
            node.open_device = weakref.WeakMethod(self.device)
            node.on_found = self._actors.on_found
            node.on_exited = functools.partial(self._scheduler.ended, node)
        self._scheduler.open(nodes, self._nodes.solo_spec)
        self._broadcasts.open()
        self._sync.open(self.hosts)
        self._has_same_gpus = self._results == "any" and all(
            host.is_here and host.gpus == "auto" and "CUDA_VISIBLE_DEVICES" not in self._images.variables(host)
            for host in self.selected
        )

    def over(self, asker: Asker) -> Compute:
        """Has the pool use, when it is opened, the connections of `asker` to its hosts: no further login."""
        self._choice.adopt(asker, self.selected)
        return self

    def _connect(self) -> Sequence[Node]:
        chosen = self._choice.choose(self.events)
        self._images.add(chosen)
        nodes = self._nodes.make_nodes(chosen, self.inventory, self._choice.reach)
        open_all(nodes, self.events, lambda node: self._images.settled(node.host), self._sync.read_ahead)
        if self._gpus == "free":
            self._nodes.take_free(nodes)
        return nodes

    def close(self) -> None:
        """Stops all processes of the pool on all hosts. Does nothing in a forked child: the parent owns it."""
        if self._is_parents:
            return
        refuse_to_block()
        if not self._open:
            self._nodes.close()  # another thread may be connecting
            self._sync.close()  # a call that was interrupted by closing may have begun to watch again
            return
        with self._closing:
            try:
                for mirror in self._mirrors.copy():
                    mirror.close()
                self._mirrors.clear()
                self._around.close()
                tell_files(self.hosts, self.inventory, self.events)
                self._nodes.recovery.close()
            finally:
                with SIGNAL_GUARD:  # its hosts end also if a handler raises now
                    self._open = False
                    _open_pools.discard(self)
                    self._stop()

    def _stop(self) -> None:
        try:
            self._forwards.close()
            self._devices.close()
            self._actors.close()
            self._scheduler.fail_all()
            self._broadcasts.close()
        finally:
            self._nodes.close()
        for node in self.hosts:
            self.events.emit(HostState(host=node.name, state="closed"))

    # ---- running

    @property
    def world_size(self) -> int:
        """Number of ranks of a broadcast."""
        return sum(map(self._broadcasts.ranks_on, self.hosts))

    def run(self, call: Call[R]) -> R:
        """Runs a call on one worker and waits for it: ``call >> compute``."""
        SIGNAL_GUARD.wrap()
        found = self._pack_solo(call, None, same_gpus=self._has_same_gpus)
        if isinstance(found, PackedCall) and found.yields:
            return self._generate(found, None)  # type: ignore[return-value]
        if emitting:
            refuse_to_block()
        if isinstance(found, PackedCall) and not found.found:
            with SIGNAL_GUARD, self.events.waiting:
                result: R = self._scheduler.run(found)
            if result is not NOT_TAKEN:
                return result
        with SIGNAL_GUARD:  # a call that has started is waited for, and cancelled if that is interrupted
            future: Future[R] = self._start(call, found)
            return wait_for(future, self.hosts, self.events.waiting)

    def broadcast(self, call: Call[R], *, collect: Literal["all", "head"] = "all") -> list[R]:
        """Runs a call on every rank and waits for all: ``call @ compute`` is a list in rank order.

        With ``collect="head"``, arrays and tensors of 1 MiB and more that are equal to those of the head's result, such
        as the weights of a trained model, are fetched from the head only.
        Raises BroadcastError if a rank fails; it has the results of the others.
        """
        self._check_call(call)
        if collect != "all":
            return self._collected(call, collect)
        packed = self._pack(call)
        with SIGNAL_GUARD:
            future: Future[list[R]] = self._broadcasts.submit(packed, self.hosts, pool=self)
            return wait_for(future, self.hosts, self.events.waiting)

    def _collected(self, call: Call[Any], collect: str) -> list[Any]:
        elastic = any(plugin.elastic for plugin in self._images.plugins)
        if collect != "head" or call.function.yields or self._results == "data" or elastic:
            hint = 'collect="head" is for functions that return, in pools without results="data" and elastic gangs'
            raise UsageError(f"invalid collect={collect!r}", hint=hint)
        named = Call(call.function.rewrap(Naming), call.args, call.kwargs)
        with self._collecting:
            return assembled(self.broadcast(named), lambda wanted: self.broadcast(Function(take_kept)(wanted)))

    def submit(self, call: Call[R], *, on: str = "one", keep: bool = False, gpus: _Gpus = None) -> Future[R]:
        """Starts a call: ``call > compute``. `on` is "one", "all", "head" or a host's name.

        It waits for `gpus` GPUs of one host, or that share of one such as 0.5, and has them for itself (docs/gpus.md).

        Arrays and tensors are not copied: do not modify them until the future is done. If the arguments contain tensors
        of a remote device of that host, the call runs in the worker of the device and uses the tensors directly. With
        `keep` it always runs in such a worker; the tensors of its result stay on the host, and the result has remote
        tensors (docs/remote_device.md). Raises NotPicklable.
        """
        self._check_call(call)
        if gpus and (on == "all" or keep):
            raise UsageError("gpus= is for a call to one host: a broadcast has all GPUs of its hosts, a device its own")
        if on == "all":
            if keep:
                hint = "[compute.submit(call, on=host.name, keep=True) for host in compute.hosts]"
                raise UsageError("keep=True is for a call to one host, but this call is a broadcast", hint=hint)
            return self._broadcasts.submit(self._pack(call), self.hosts, pool=self)
        node = None if on == "one" else named(self.hosts, on)
        found = self._pack_solo(call, node)
        if isinstance(found, PackedCall) and gpus is not None:
            found.gpus = gpus
        if isinstance(found, PackedCall) and found.yields:
            future = CallFuture()
            future.settle(self._generate(found, node))
            return future
        return self._start(call, found, node, keep=keep)

    def _generate(self, packed: PackedCall, node: Node | None) -> RemoteIterator[Any]:
        """Starts a generator on one worker."""
        task = Task(packed, on=node)
        try:
            with SIGNAL_GUARD:
                self._scheduler.add(task)
                task.future.pool = self
                assert task.conversation is not None
                return RemoteIterator(task.conversation)
        except BaseException:  # what a handler raises at the end of the block: nothing would end the generator
            if task.conversation is not None:
                task.conversation.close(wait=False)
            raise

    def _start(
        self, call: Call[Any], found: PackedCall | DeviceStream, node: Node | None = None, *, keep: bool = False
    ) -> CallFuture:
        """Starts a call on one worker: of the scheduler's, or of a device."""
        started: Task | DeviceCall
        if isinstance(found, PackedCall) and not keep:
            started = Task(found, on=node)
            self._scheduler.add(started)
        else:
            tree = self._sync_tree()
            if isinstance(found, PackedCall):
                found = self._devices.open(node or self.hosts[0], "auto", tree)
            timeout = self._timeout_of(call.function)
            started = self._devices.start(found, call, node, tree, timeout=timeout, keep=keep)
        started.future.pool, started.future.waiting = self, self.events.waiting
        if call.function.stall is not None:
            watch(started.future, started.processes, call.function.stall, call.function.label, self.events)
        return started.future

    def _pack_solo(self, call: Call[Any], node: Node | None, *, same_gpus: bool = False) -> PackedCall | DeviceStream:
        """The packed call; or the device in whose worker it must run to have its tensors themselves."""
        if not self._open or not isinstance(call, Call):
            self._check_call(call)
        if not self._devices.streams:
            return self._pack(call, same_gpus=same_gpus)
        found, inside = collect(lambda: self._devices.find(call, node))
        if isinstance(found, codec.Payload):
            return self._pack(call, (found, inside))
        if inside or call.function.yields:
            raise UsageError("a call with tensors of a remote device cannot be a generator, or pass streams or actors")
        return found

    def _pack(
        self,
        call: Call[Any],
        packed: tuple[codec.Payload, Sequence[Any]] | None = None,
        *,
        same_gpus: bool = False,
    ) -> PackedCall:
        """Packs a call, and syncs the project's files to every host."""
        about = call.function
        same_gpus = same_gpus and not (about.retries or about.gpus)  # then it runs once, with all GPUs
        arguments, found = packed or pack_streams(call, same_gpus=same_gpus)
        if found:
            self._actors.check(found)
        if about.retries and (about.yields or any(isinstance(one, Stream) for one in found)):
            hint = "their values are not produced twice: call the function again in your program"
            raise UsageError(f"{about.label} cannot have retries=: it is a generator, or reads a stream", hint=hint)
        return PackedCall(
            arguments=arguments,
            function=pack_function(about, self._images.plugins),
            tree=self._sync_tree(),
            label=about.label,
            timeout=self._timeout_of(about),
            retries=about.retries,
            stall=about.stall,
            yields=about.yields,
            ahead=about.ahead,
            gpus=about.gpus,
            found=found,
            same_gpus=same_gpus,
        )

    def launch(self, call: Call[Any], *, on: str = "all", name: str | None = None) -> Run:
        """Starts a `call` that outlives this program: the hosts keep its output and result. `on` is as in `submit`.

        `name` is by default that of the function. The run has its own workers. Returns once the hosts have all they
        need; ``sky.attach(run.id)`` or ``sky.attach(name)`` finds the run again.
        """
        self._check_call(call)
        packed = self._pack(call)
        if packed.converses or packed.found:
            what = f"{packed.label} cannot be a detached run: it is a generator, or an argument is a stream or an actor"
            hint = "no program exchanges values with a run: return a list, write to files, create objects in it"
            raise UsageError(what, hint=hint)
        broadcasts, tree = self._broadcasts, self._sync.tree
        chosen = broadcasts.available(self.hosts) if on == "all" else [named(self.hosts, on)]
        ranks = [broadcasts.ranks_on(node) if on == "all" else 1 for node in chosen]
        nodes = self._nodes.copies(chosen)
        detacher = Detacher(nodes, ranks, label=packed.label, name=name)
        if on == "all":
            job = f"{detacher.id}-1"
            detacher.start_gang(lambda: broadcasts.new_gang(broadcasts.spec(nodes, packed.tree), job), tree, packed)
        else:
            detacher.start_one(self._nodes.solo_spec, tree, packed)
        self._closing.enter_context(failure.left_running(detacher.id[:8]))
        return self._launched(detacher, chosen)

    def detach(self, *, name: str | None = None) -> Run:
        """Detaches the running broadcast: it continues on the hosts as a run called `name`. Closes the pool.

        If a rank has failed already, raises what the broadcast raises.
        """
        self._check_open()
        running = self._broadcasts.at_work
        if running is None or running.gang is None:
            hint = "submit(call, on='all') starts one; launch(call), a run"
            raise UsageError("no broadcast is running on every rank", hint=hint)
        if running.has_failed:
            running.future.result()  # its other ranks are stopped soon
        if running.call.converses or running.call.found:
            what = "it is a generator, or an argument is a stream or an actor"
            raise UsageError(f"{running.call.label} cannot be detached: {what}")
        nodes = running.gang.nodes
        detacher = Detacher(nodes, [*map(self._broadcasts.ranks_on, nodes)], label=running.call.label, name=name)
        self._forwards.close()
        for mirror in self._mirrors.copy():
            mirror.leave()
        self._scheduler.fail_all()  # only this broadcast continues; queued calls would count as part of the run
        self._broadcasts.close()
        detacher.take_over(running)
        self.close()
        return self._launched(detacher, nodes)

    def _launched(self, detacher: Detacher, nodes: Sequence[Node]) -> Run:
        note_used(self.inventory)
        return attach(detacher.id, [node.host for node in nodes], inventory=self.inventory, results=self._results)

    def wait_for_ranks(self, timeout: float) -> None:
        """Waits up to `timeout` seconds until no rank runs a broadcast; those of a cancelled one need a moment."""
        self.hosts[0].session.wait(lambda: self._broadcasts.is_idle, timeout)

    def gather(self, *calls: Call[Any] | Group) -> tuple[Any, ...] | Iterator[Any]:
        """Runs `calls` in parallel: ``compute.gather(f(1), g(2))`` is ``(f(1) & g(2)) >> compute``."""
        return as_group(calls).results(self.submit)

    @overload
    def map(self, function: Function[..., R], *items: _Items, gpus: _Gpus = None) -> list[R]: ...
    @overload
    def map(self, function: Callable[..., R], *items: _Items, gpus: _Gpus = None) -> list[R]: ...
    @overload
    def map(self, function: Any, *items: _Items, errors: Errors, gpus: _Gpus = None) -> list[Any]: ...
    def map(self, function: Any, *items: _Items, errors: Errors = "raise", gpus: _Gpus = None) -> list[Any]:
        """Applies `function` to each of `items`, balanced over all slots of all hosts. Results are in order.

        With `gpus`, as for `submit`, an item begins as soon as that many GPUs of a host are free. Short items are sent
        in groups. Raises the first failure, and cancels the rest; with ``errors="return"`` an exception takes the place
        of the result, and the rest continues.
        """
        self._check_open()
        check_errors(errors)
        if isinstance(function, Call):
            name = function.function.label
            raise UsageError(
                f"{name}(…) is a call, and map needs the function itself: write compute.map({name}, items)"
            )
        fn = as_function(function)
        if not items:
            raise TypeError(f"map() takes items too: compute.map({fn.label}, items)")
        if fn.yields:
            hint = f"sky.gather(*({fn.label}(item) for item in items)) >> compute runs them in parallel"
            raise UsageError(f"map cannot call {fn.label}: it is a generator function", hint=hint)
        calls = [fn(*arguments) for arguments in zip(*items, strict=False)]
        each = self._pack(fn(), (codec.Payload(b""), ()))
        each.gpus = fn.gpus if gpus is None else gpus
        progress = self.events.progress(fn.label, len(calls))
        made = MapCall(self._scheduler, each, calls, errors=errors, progress=progress)
        with SIGNAL_GUARD:
            return wait_for(made.start(), self.hosts, self.events.waiting)

    def actor(
        self,
        kind: Callable[..., Any],
        /,
        *args: Any,
        on: str = "one",
        gpus: float = 0,
        concurrency: int = 1,
        restarts: int = 0,
        **kwargs: Any,
    ) -> Handle:
        """Creates ``kind(*args, **kwargs)`` in its own process on a host; the handle calls its methods there.

        ``handle.method(x)`` waits, ``handle.method.submit(x)`` returns a future, and a method that yields returns an
        iterator. Calls run in the order of their submission, `concurrency` at a time, each on its own thread. `on` is a
        host, "head", or "one" for the one with the fewest actors. The process has `gpus` GPUs for itself, as for
        `submit`. If it ends, calls raise ActorLost; `restarts` is how often the object is created again
        (docs/actors.md). Raises what the constructor raises.
        """
        self._check_open()
        nodes = self.hosts if on == "one" else [named(self.hosts, on)]
        limits = Limits(gpus=gpus, concurrency=concurrency, restarts=restarts)
        made = Function(construct)(kind, args, kwargs, sources=sources_of(kind))
        return self._actors.make(made, nodes, limits)

    def executor(self, gpus: float = 0) -> PoolExecutor:
        """The pool as a `concurrent.futures.Executor`, with all slots of all hosts (docs/engines.md).

        Each of its calls has `gpus` GPUs of one host for itself, or that share of one such as 0.5.
        """
        from skyfab.engines.executor import PoolExecutor

        self._check_open()
        return PoolExecutor(self, self._scheduler.slots_for(gpus), gpus=gpus)

    def command(self, words: Sequence[str]) -> Call[int]:
        """A call that runs any program, such as ``compute.command(["vllm", "serve", …, "--node-rank={node}"])``.

        ``@`` runs it on every rank, with torchrun's variables, in the working folder. In its `words`, {rank},
        {world_size}, {local_rank}, {node}, {nodes}, {head} and {port} are replaced. Returns 0; raises WorkerDied with
        the exit code or signal, and HostUnfit if the host has no such program.
        """
        from skyfab.host.command import execute

        if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
            raise UsageError(f"invalid command: {words!r:.80}", hint='expected a list of strings: ["nvidia-smi", "-L"]')
        function = as_function(execute)
        function.label = words[0]
        return function(list(words))

    def dask(
        self, *, workers: int | None = None, threads: int | None = None
    ) -> contextlib.AbstractContextManager[distributed.Client]:
        """Starts Dask on all hosts, for a ``with`` block; its client is the default for Dask's collections in it.

        `workers` is the number of processes on each host (None: one for each GPU, or one), `threads` how many each
        has (None: the host's cores divided by its workers). Hosts need `plugins.dask`, or Dask in their image
        (docs/engines.md). Raises PeersUnreachable if the hosts cannot connect to each other.
        """
        self._check_open()
        if self._results == "data":
            raise UsageError("compute.dask() unpickles what hosts send", hint='use Compute(results="any")')
        from skyfab.engines.dask import DaskCluster

        nodes = [node for node in self.hosts if node.lost is None] or self.hosts
        return DaskCluster(self, nodes, peer_addresses(nodes), workers=workers, threads=threads)

    def study(
        self,
        study: optuna.Study,
        objective: Any,
        *,
        n_trials: int,
        gpus: _Gpus = None,
        catch: tuple[type[Exception], ...] = (),
        callbacks: Sequence[Callable[[optuna.Study, Any], None]] = (),
    ) -> None:
        """Runs `n_trials` trials of an Optuna study on the hosts, as many at a time as fit (docs/engines.md).

        `objective` is a function of a trial, `gpus` as for `submit`, `catch` and `callbacks` as for Optuna's
        ``study.optimize``. If the host of a trial is lost, the trial fails, and the others continue.
        """
        from skyfab.engines.study import run_trials

        self._check_open()
        run_trials(self, study, objective, n_trials=n_trials, gpus=gpus, catch=catch, callbacks=callbacks)

    def put(self, obj: T) -> Ref[T]:
        """Returns a reference to pass to calls instead of `obj`, which is then sent to each host only once.

        The object is copied now: later changes, by this program or a call, are not visible to other calls. Raises
        NotPicklable.
        """
        return put(obj)

    def upload(self, path: AnyPath, *, to: AnyPath | None = None, on: str = "all") -> list[Report]:
        """Copies the file or folder `path` to hosts, where `to` is relative to the working folder (docs/files.md).

        `on` is a host, "head" or "all". Without `to`, it keeps its path relative to the current folder. Skips files
        that the hosts already have.
        """
        return self.files.upload(path, to, self._chosen(on))

    def download(self, path: AnyPath | Sequence[AnyPath], *, to: AnyPath = ".", on: str = "all") -> list[Report]:
        """Copies the files and folders of `path`, which may be patterns such as ``ckpt/*``, from hosts into `to`.

        `on` is as in `upload`. Files that several hosts have go into a folder named after each host.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        return self.files.download(paths, to, self._chosen(on), apart=on == "all" and len(self.hosts) > 1)

    def fetch(
        self, source: str, *, include: Sequence[str] = (), exclude: Sequence[str] = (), on: str = "all"
    ) -> list[Fetched]:
        """Puts a model of the Hugging Face hub into the caches of hosts, where its libraries find it (docs/files.md).

        `source` is ``hf://org/model`` or ``hf://datasets/org/name``, optionally with ``@revision``, or the URL of a
        file, ``https://host/file.bin#sha256=…``. `include` and `exclude` are patterns of paths in a repository. Hosts
        that reach the server download different files and pass them on to the others; if no host reaches it, this
        machine downloads. `on` is a host, "head" or "all".
        """
        from skyfab.pool.fetch import fetch

        return fetch(source, (include, exclude), self._chosen(on), self.relay, self._nodes.solo_spec)

    def mirror(
        self, path: AnyPath | Sequence[AnyPath], *, to: AnyPath = ".", on: str = "head", limit: str | None = None
    ) -> Mirror:
        """Copies new files in `path` on hosts into `to` while they work: only complete files, newest first.

        `path`, `to` and `on` are as in `download`, but each of several hosts has a folder in `to`. `limit` is in bytes
        per second, such as ``"20MB/s"``. Ends with a final pass at the end of its ``with`` block or of the pool, or
        when it is stopped (docs/files.md). Raises UsageError if another mirror writes to the folder.
        """
        from skyfab.pool.mirror import Mirror

        paths = [path] if isinstance(path, (str, os.PathLike)) else path
        made = Mirror(paths, to, limit, self._chosen(on), self._nodes.solo_spec, self.events)
        self._mirrors.difference_update([one for one in self._mirrors.copy() if one.is_stopped])
        self._mirrors.add(made)
        return made

    def _chosen(self, on: str) -> Sequence[Node]:
        self._check_open()
        return self.hosts if on == "all" else [named(self.hosts, on)]

    def forward(self, port: int | str, *, on: str = "head", local: int | None = None) -> Forward:
        """Forwards a port of a host to 127.0.0.1 on this machine, until the pool is closed (docs/forward.md).

        `port` is a port of the host, or ``"name:port"`` for another machine that the host can connect to. `on` is a
        host, or "head". `local` is the port on this machine; None: the same one if it is free, else any; 0: any.
        """
        self._check_open()
        return self._forwards.open(named(self.hosts, on).host, self.inventory, port, local)

    def ray(self, *, num_cpus: int | None = None, object_store_memory: int | None = None) -> RayCluster:
        """Ray on all hosts of the pool: ``with compute.ray() as address:`` (docs/engines.md). Needs `plugins.ray`.

        As for ``ray start``, each host has `num_cpus` CPUs, and `object_store_memory` bytes of memory for objects.
        """
        from skyfab.engines.ray import RayCluster

        self._check_open()
        options = {"num-cpus": num_cpus, "object-store-memory": object_store_memory}
        return RayCluster(self, self._images, peer_addresses, options)

    def device(
        self,
        kind: str = "auto",
        *,
        on: str | None = None,
        name: str | None = None,
        keep: str | float = "8h",
        idle: str | float | None = None,
    ) -> torch.device:
        """Returns a device of a host as a `torch.device`: tensors and modules work on it unmodified.

        `kind` is "cuda", "cuda:1", "cpu", or "auto" for the first GPU, or the CPU if there is none. `on` is a host, by
        default the first. With a `name` it outlives this program: what `sky.keep` keeps on it stays for `keep`, such as
        "8h" or "30m", after a program has ended, and `sky.attach_device(name)` finds it. If it is not used for `idle`,
        its tensors are moved into the memory of the host, until they are used again.
        """
        self._check_open()
        node = named(self.hosts, on or "head")
        if name is None:
            return self._devices.open(node, kind, self._sync_tree()).torch_device
        stay = call_that_stays(node, kind, keep=keep, idle=idle)
        used = self._devices.find_lasting(node, name, runs(self.selected, inventory=self.inventory))
        if used is None:
            used = self._devices.join_new(node, self.launch(stay, on=node.name, name=name), self._sync_tree())
        return used.torch_device

    def join_device(self, run: Run, *, seeded: bool) -> DeviceStream:
        """Uses the device of a `run`. If it is not `seeded`, its random numbers continue. Raises UsageError."""
        return self._devices.join(named(self.hosts, run.hosts[0]), run.id, self._sync_tree(), seeded=seeded)

    def _check_call(self, call: Call[Any]) -> None:
        if not isinstance(call, Call):
            raise not_a_call(call)
        self._check_open()

    def _timeout_of(self, function: Function[..., Any]) -> float | None:
        return self._timeout if function.timeout is None else function.timeout

    __array_ufunc__ = None  # else numpy would apply an operator to each element of an array

    def __rrshift__(self, value: object) -> NoReturn:
        if isinstance(value, Call):  # its own operator has run it
            what = f"{value.function.label}(…) ran and returned NotImplemented, which an operator cannot return"
            raise UsageError(what, hint="compute.run(call) returns it")
        raise not_a_call(value)

    __rmatmul__ = __lt__ = __rrshift__  # an operator with anything but a call on its left

    def _operator(self, other: object) -> NoReturn:
        if isinstance(other, (Call, Group)):
            name = f"{other.function.label}(…)" if isinstance(other, Call) else "the calls"
            raise UsageError(f"the pool is on the left of {name}: write {name.removeprefix('the ')} >> compute")
        raise not_a_call(other)

    if not TYPE_CHECKING:  # type checkers refuse what is not defined, and what follows NoReturn they do not check
        __rshift__ = __matmul__ = __gt__ = __and__ = _operator

    # ---- internals

    def leave_to_parent(self) -> None:
        """In a forked child: the connections belong to the parent process, and must not be used here."""
        self._open, self._is_parents = False, True
        self._forwards.leave_to_parent()

    def _check_open(self) -> None:
        if self._is_parents:
            raise _parents_pool()
        if not self._open:
            raise UsageError("the pool is not open", hint="call it inside the block: with sky.Compute(…) as compute: …")
        SIGNAL_GUARD.wrap()

    @without_signals
    def __del__(self) -> None:
        """Closes it on a new thread: the garbage collector may run on any thread, with any lock held."""
        if getattr(self, "_open", False) and not sys.is_finalizing():
            text = f"a pool was dropped while it was open: {', '.join(node.name for node in self.hosts)}"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)
            threading.Thread(target=self.close, daemon=True).start()


def _leave_all_to_parent() -> None:
    for pool in list(_open_pools):
        pool.leave_to_parent()
    _open_pools.clear()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _parents_pool() -> UsageError:
    """The error for using a pool in a child that was forked while it was open."""
    return UsageError(
        "this pool was opened by the process that this one was forked from",
        hint="open another one in this process: with sky.Compute(…) as compute: …",
    )


def _check_options(
    *, ranks: int | str, slots: int | None, gpus: str, seconds: Mapping[str, Any], results: str, ui: str
) -> None:
    """Raises UsageError for invalid options."""
    if gpus not in ("auto", "free"):
        hint = "gpus=N is an option of map, submit, actor and @sky.function"
        raise UsageError(f"invalid gpus={gpus!r}: expected 'auto', or 'free' for those that nobody uses", hint=hint)
    if ranks != "auto" and (type(ranks) is not int or not 1 <= ranks <= MOST_SLOTS):
        raise UsageError(f"invalid ranks={ranks!r}: expected 1 to {MOST_SLOTS:,}, or 'auto'")
    if slots is not None and (type(slots) is not int or not 1 <= slots <= MOST_SLOTS):
        raise UsageError(f"invalid slots={slots!r}: expected 1 to {MOST_SLOTS:,}")
    for name, value in seconds.items():
        if value is not None or name == "lease":
            check_seconds(name, value, least=float(name == "lease"))
    if ui not in ("auto", "rich", "plain", "none"):
        raise UsageError(f"invalid ui={ui!r}: expected 'auto', 'rich', 'plain' or 'none'")
    if results not in ("any", "data"):
        raise UsageError(f"invalid results={results!r}: expected 'any', or 'data' where hosts are not trusted")
