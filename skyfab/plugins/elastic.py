"""Elastic gangs: torch.distributed.elastic starts a host's ranks, and restarts them on the remaining hosts.

In an elastic gang each host has one worker of skyfab. It runs torch's elastic agent, whose own workers are the ranks.
When a rank fails, or a host sends no more heartbeats, all ranks are restarted on the hosts that remain.
"""

from __future__ import annotations

import hmac
import logging
import os
import pickle
import shutil
import sys
import traceback
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skyfab import context
from skyfab.host.agent.functions import load_function
from skyfab.protocol import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skyfab.context import InstanceInfo
    from skyfab.plugins.base import Elastic, Plugin

SILENCE: Final = 10
"""Seconds without a heartbeat after which a host is excluded."""
LAST_CALL: Final = 3.0
"""Seconds to wait for more hosts once there are enough."""
_SIGNATURE: Final = 32
"""Length in bytes of an HMAC with SHA-256."""
EXIT_TIMEOUT: Final = 30.0
"""Seconds that hosts wait for each other at the end."""


def run_elastic_agent(
    elastic: Elastic, open_store: Callable[[InstanceInfo], Any], info: InstanceInfo, work: tuple[Any, ...]
) -> list[tuple[int, Any]]:
    """Runs `work` (function with plugins, and arguments, both pickled) in this host's ranks; restarts it as needed.

    Returns the rank, in the last attempt, and the result of each. When no attempts are left, raises the exception of
    the first rank that failed.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a new store for every attempt: no stale keys
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # SIGTERM terminates this process and its ranks
    shutil.rmtree(_folder(), ignore_errors=True)  # failures of earlier calls
    store = open_store(info)
    rendezvous = _rendezvous(elastic, store, info)
    spec = WorkerSpec(
        role="skyfab",
        local_world_size=info.local_world_size,
        entrypoint=perform,
        args=(*work, info._asdict(), context.own_folder()),
        rdzv_handler=rendezvous,
        max_restarts=elastic.max_restarts,
        local_addr=info.peers[info.rank],
    )
    # A rank that fails reports that itself, in one line.
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    logs = DefaultLogsSpecs(log_dir=str(_folder()))
    try:
        ended = LocalElasticAgent(spec, logs, exit_barrier_timeout=EXIT_TIMEOUT).run()
    finally:
        rendezvous.shutdown()
        del store  # the head's is the server for the others: keep it until here
    if ended.is_failed():
        raise _failure(ended.failures)
    return [(rank, codec.loads(*pickle.loads(value))) for rank, value in sorted(ended.return_values.items())]


def _rendezvous(elastic: Elastic, store: Any, info: InstanceInfo) -> Any:
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    class Rendezvous(DynamicRendezvousHandler):  # type: ignore[misc]
        """Torch's rendezvous only detects hosts that join. This one also reports hosts that are lost."""

        attempt = info.attempt
        reason = ""
        size = 0
        """How many hosts take part in the attempt."""
        fewer: Any = None
        """The last state that torch has read, if hosts are missing in it."""

        def next_rendezvous(self) -> Any:
            if self.reason:
                print(f"attempt {self.attempt - 1} ended: {self.reason}", file=sys.stderr)
            self.reason = "a rank on this host failed"
            os.environ["SKYFAB_ATTEMPT"] = str(self.attempt)
            self.attempt += 1
            found = super().next_rendezvous()
            self.size, self.fewer = found.world_size, None
            return found

        def num_nodes_waiting(self) -> int:
            waiting = super().num_nodes_waiting()  # also removes hosts without heartbeats from the state
            state, before = self._state_holder.state, self.fewer
            missing = 0 if state.closed else self.size - len(state.participants)
            self.fewer = state if missing else None
            if waiting:
                self.reason = "another host joins, or restarts its ranks"
            elif missing and before and before is not state:  # a host that restarts its ranks is missing in one state
                self.reason = f"{missing} of {self.size} hosts sent no heartbeat for {SILENCE} s"
                waiting = missing
            return int(waiting)

    return Rendezvous.from_backend(
        run_id=info.job_id,
        store=store,
        backend=_Signed(C10dRendezvousBackend(store, info.job_id), elastic.secret, info),
        min_nodes=min(elastic.min_hosts, len(info.peers)),
        max_nodes=len(info.peers),
        local_addr=info.peers[info.rank],
        timeout=RendezvousTimeout(last_call=timedelta(seconds=LAST_CALL)),
        keep_alive_interval=SILENCE // 5,
        keep_alive_max_attempt=5,
    )


class _Signed:
    """A rendezvous backend of torch that only accepts state signed by members of this gang.

    Torch unpickles the state, and any process that can connect to the port can write it, for instance those of other
    users on the head's host. The other keys in the store are numbers, JSON and addresses.
    """

    def __init__(self, backend: Any, secret: bytes, info: InstanceInfo) -> None:
        self._backend = backend
        self._key = hmac.digest(secret, repr((info.job_id, info.attempt, info.peers)).encode(), "sha256")

    @property
    def name(self) -> Any:
        return self._backend.name

    def get_state(self) -> Any:
        found = self._backend.get_state()
        return found and (self._checked(found[0]), *found[1:])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        found = self._backend.set_state(self._sign(state) + state, token)
        return found and (self._checked(found[0]), *found[1:])

    def _sign(self, state: bytes) -> bytes:
        return hmac.digest(self._key, state, "sha256")

    def _checked(self, content: bytes) -> bytes:
        from torch.distributed.elastic.rendezvous.api import RendezvousStateError

        signature, state = content[:_SIGNATURE], content[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(state)):
            raise RendezvousStateError("a process that does not belong to this gang wrote to its rendezvous")
        return state


# ---- in the ranks


def perform(packed: Sequence[bytearray], arguments: Sequence[bytearray], place: dict[str, Any], folder: str) -> bytes:
    """The entry point of each rank: sets up `instance_info` and the plugins, and runs the function."""
    context.worker_folder = folder
    os.environ["TORCHELASTIC_RESTART_COUNT"] = os.environ["SKYFAB_ATTEMPT"]  # torch's own count differs between hosts
    info = context.InstanceInfo(**place)._replace(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        head_addr=os.environ["MASTER_ADDR"],
        head_port=int(os.environ["MASTER_PORT"]),
        total_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        attempt=int(os.environ["SKYFAB_ATTEMPT"]),
    )
    context.enter(info)
    context.offer_stacks(f"{info.job_id}.rank{info.local_rank}", info.rank)
    try:
        return _flat(_perform(info, packed, arguments))
    except Exception as error:
        print(f"rank {info.rank} failed, attempt {info.attempt}: {type(error).__name__}: {error}", file=sys.stderr)
        _leave(error)
        raise SystemExit(1) from None


def _perform(info: InstanceInfo, packed: Sequence[bytearray], arguments: Sequence[bytearray]) -> Any:
    load = codec.loader(packed[0], packed[1:])
    plugins: Sequence[Plugin] = load()
    with ExitStack() as around:
        for plugin in plugins:
            around.enter_context(plugin.around_process(info))
        try:
            function = load_function(load, plugins)
            *args, kwargs = codec.loads(arguments[0], arguments[1:])
            return function(*args, **(kwargs or {}))
        except Exception as error:
            _leave(error)  # before the plugins disconnect from the other ranks, which then fail too
            raise


def _flat(value: object) -> bytes:
    """Pickles a value with its buffers into one bytes object, for torch's queues."""
    payload = codec.dumps(value)
    return pickle.dumps((payload.data, [bytearray(buffer) for buffer in payload.buffers]))


# ---- failures


def _folder() -> Path:
    """A folder that is deleted with the pool."""
    return Path(context.own_folder()) / "elastic"


class _Text(Exception):
    """A rank's traceback, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _leave(error: Exception) -> None:
    """Writes the failure to a file for this host's elastic agent, which reports the first one of the last attempt."""
    path = _folder() / f"{os.environ['SKYFAB_ATTEMPT']}.{os.environ['RANK']}.failure"
    if path.exists():
        return
    _folder().mkdir(exist_ok=True)
    text = traceback.format_exc()
    try:
        content = _flat((error.with_traceback(None), text))
    except Exception:
        content = _flat((RuntimeError(f"{type(error).__name__}: {error}"), text))
    path.write_bytes(content)


def _failure(failures: dict[int, Any]) -> Exception:
    """The exception of the first rank on this host that failed. Torch reports one, but not which was the first."""
    written = _folder().glob(f"{os.environ['SKYFAB_ATTEMPT']}.*.failure")
    earliest = min(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    if earliest is None:  # the rank was killed
        rank, first = next(iter(failures.items()))
        return RuntimeError(f"rank {rank} ended with exit code {first.exitcode}")
    error, text = codec.loads(*pickle.loads(earliest.read_bytes()))
    object.__setattr__(error, "__cause__", _Text(text))  # its class may forbid assignments
    found: Exception = error
    return found
