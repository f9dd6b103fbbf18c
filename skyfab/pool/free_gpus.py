"""``Compute(gpus="free")``: a worker on each host holds the GPUs that nobody else uses, until the pool is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from skyfab._util import schema
from skyfab.calls.call import as_function
from skyfab.calls.pack import PackedCall, pack_function
from skyfab.calls.results import unpack_result
from skyfab.errors import HostUnfit, ProtocolError
from skyfab.host.gpu_locks import hold_free
from skyfab.pool.node import Node, WorkerSpec
from skyfab.pool.nodes import close_all
from skyfab.protocol import codec
from skyfab.session.fanout import for_each_host, results_of
from skyfab.session.replies import Reply


def take_free(nodes: Sequence[Node], spec_of: Callable[[Node, str], WorkerSpec]) -> None:
    """From now on, a node has only the GPUs that were free. Raises HostUnfit for one without any, and closes all."""

    def take(node: Node) -> None:
        reply = Reply()
        arguments = codec.dumps((list(node.gpus), None))
        call = PackedCall(function=pack_function(as_function(hold_free)), arguments=arguments, label="gpus='free'")
        node.call("gpus", replace(spec_of(node, ""), plain=True, claims=False), call, caller=reply)
        found = unpack_result(*reply.wait(), host=node.name, rank=None, label=call.label, untrusted=True)
        try:
            gpus, reason = schema.parse(tuple[tuple[int, ...], str], found)
        except schema.Invalid as error:
            raise ProtocolError(f"not a list of GPUs: {error}", host=node.name) from None
        if not gpus or not set(gpus) <= set(node.gpus):
            hint = "choose hosts by where='gpus.free >= 1', or wait: skyfab run --when-free"
            raise HostUnfit(f"no GPU is free: {reason}", host=node.name, hint=hint)
        node.host = replace(node.host, gpus=gpus)

    try:
        results_of(for_each_host(take, nodes))
    except BaseException:
        close_all(nodes)
        raise
