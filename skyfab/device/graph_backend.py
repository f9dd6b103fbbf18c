"""``torch.compile`` on remote devices: Dynamo runs here, and each graph that it finds is one instruction each way.

Dynamo traces the program with fake tensors, and checks in every call whether what it has traced still applies. A graph
is sent once. The host compiles it, with its backward, as ``torch.compile`` would for its own device: so it has the same
kernels. What the graph means for autograd in this program (which inputs it changes, which results have gradients) is
read from Dynamo's fake tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.fx.node import map_aggregate

from skyfab.device import remote_functions, tensors
from skyfab.device.tensors import TYPE, is_remote
from skyfab.errors import UsageError
from skyfab.host.device import composite_host, graph_host

_OURS: Final = re.compile(rf"{TYPE}(:\d+)?")
_THERE: Final = ("inductor", "eager")
_CHECKPOINT: Final = torch.ops.higher_order.tag_activation_checkpoint


def backend(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(…, backend="sky")``: what compiles a graph of Dynamo.

    Options are those of Inductor, and ``"there"``: "inductor", or "eager" to execute graphs as they are. A graph
    without remote tensors is compiled here.
    """
    from torch._inductor import list_mode_options

    found = {"there": _THERE[0], **(list_mode_options(mode) if mode else {}), **(options or {})}
    if is_remote_graph(module):
        return compile_graph(module, found)
    from torch._inductor.compile_fx import compile_fx

    del found["there"]
    return compile_fx(module, inputs, config_patches=found)  # type: ignore[no-any-return]


def compile_graph(module: torch.fx.GraphModule, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A function that executes a graph on its device. Raises UsageError for invalid options."""
    if options["there"] not in _THERE:
        raise UsageError(f"invalid option there={options['there']!r}: expected {' or '.join(map(repr, _THERE))}")
    about = _Analysis(module)
    if about.obstacle:
        for index in about.devices:
            remote_functions.notice_once(
                index, f"a part of a compiled function runs operator by operator: {about.obstacle}"
            )
        return module.forward  # type: ignore[no-any-return]
    return _RemoteGraph(module, about, options)


def is_remote_graph(module: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo has tensors of a remote device."""
    return any(is_remote(value) for node in module.graph.nodes for value in _flat(node.meta.get("example_value")))


def _flat(value: Any) -> Sequence[Any]:
    return [item for each in value for item in _flat(each)] if isinstance(value, list | tuple) else (value,)


class _Analysis:
    """What a graph means for this program, as Dynamo's fake tensors show it."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        graph = module.graph
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        constants = [node for node in graph.nodes if node.op == "get_attr" and _is_tensor(module, node)]
        self.lifted = list(dict.fromkeys(node.target for node in constants))
        """Names of tensors that are attributes of the graph, as an optimizer's state: they become inputs."""
        by_name = {node.target: node.meta.get("example_value") for node in constants}
        self.inputs = [*(node.meta.get("example_value") for node in placeholders), *(by_name[n] for n in self.lifted)]
        self.results = [
            node.meta.get("example_value") if isinstance(node, torch.fx.Node) else node
            for node in _flat(graph.output_node().args[0])
        ]
        values = [value for node in graph.nodes for value in _flat(node.meta.get("example_value"))]
        self.devices = sorted({value.device.index or 0 for value in values if is_remote(value)})
        self.written = {at for at, value in enumerate(self.inputs) if _is_written(value)}
        """Indices of inputs that it changes in place."""
        self.is_dynamic = any(isinstance(value, torch.SymInt) for value in self.inputs)
        reached = _reached([value for value in self.results if getattr(value, "requires_grad", False)])
        self.differentiable = {
            at
            for at, value in enumerate(self.inputs)
            if isinstance(value, torch.Tensor) and (id(value) in reached or id(value.grad_fn) in reached)
        }
        """Indices of inputs that have a gradient if they require one."""
        self.obstacle = self._obstacle(module)

    def _obstacle(self, module: torch.fx.GraphModule) -> str:
        """Why the graph cannot be one instruction; empty if it can."""
        from torch._subclasses.fake_tensor import FakeTensor

        if len(self.devices) > 1:
            return "it has tensors of several devices"
        for part in module.modules():
            for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
                if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not _CHECKPOINT:
                    return f"it has the operator {node.target.name()}"
                if getattr(node.target, "__name__", "") == "_grad_increment_nesting":
                    return "it computes gradients inside, with torch.func"
        for at, value in enumerate((*self.inputs, *self.results)):
            if isinstance(value, torch.Tensor):
                if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
                    return "it has tensors that are not dense"
                if at in self.written and value.requires_grad and not value.is_leaf:
                    return "it changes an input in place that has a gradient"
                if at in self.written and not is_remote(value):
                    return f"it changes a tensor on {value.device} in place"
        return ""


def _is_written(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference() and value._version > 0


def _is_tensor(module: torch.nn.Module, node: torch.fx.Node) -> bool:
    return isinstance(_attribute(module, node.target), torch.Tensor)


def _attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _reached(results: Sequence[torch.Tensor]) -> set[int]:
    """The ids of leaves, and of nodes of autograd's graph, on which results depend."""
    found: set[int] = {id(value) for value in results if value.is_leaf}
    waiting = [value.grad_fn for value in results]
    keep: list[Any] = []  # ids stay valid as long as the objects exist
    while waiting:
        node = waiting.pop()
        if node is not None and id(node) not in found:
            keep.append(node)
            found.add(id(node))
            if hasattr(node, "variable"):
                found.add(id(node.variable))
            waiting += [following for following, _ in node.next_functions]
    return found


class _RemoteGraph:
    """A graph of Dynamo, as a function of its inputs."""

    def __init__(self, module: torch.fx.GraphModule, about: _Analysis, options: Mapping[str, Any]) -> None:
        self._module = module
        self._about = about
        self._lifted = [_attribute(module, name) for name in about.lifted]
        self._device = torch.device(TYPE, about.devices[0])
        self._options = options
        self._digest = ""
        self._stream: Any = None
        """The device that has the graph: one that is opened again does not."""
        self._known: dict[Any, Any] = {}
        self._specs: dict[Any, Any] = {}
        """What is sent for a call, by the numbers among the inputs: everything else is as Dynamo has traced it."""
        self._numbers = [at for at, value in enumerate(about.inputs) if not isinstance(value, torch.Tensor)]
        self._on_cpu = {at for at, v in enumerate(about.inputs) if isinstance(v, torch.Tensor) and not is_remote(v)}
        self._detached = {
            at for at in range(len(about.inputs)) if at not in about.differentiable and at not in self._numbers
        }

    def __call__(self, *args: Any) -> Any:
        given = [*args, *self._lifted]
        numbers = [composite_host.plain(given[at]) for at in self._numbers]
        key = (self._on_host(), remote_functions.autocast_dtype(), *numbers)
        spec = self._specs.get(key) or self._specs.setdefault(key, self._spec(key, given))
        found = given[:]
        for at in self._on_cpu:
            found[at] = given[at].to(self._device) if given[at].dim() else given[at]
        for at in self._detached:
            found[at] = found[at].detach()
        for at in reversed(self._numbers):
            del found[at]
        if self._about.written:  # before autograd keeps the inputs: their graph on the host knows what it changes
            torch.autograd.graph.increment_version([given[at] for at in self._about.written])
        results = remote_functions.call_module(self._known, key, spec, found, self._device)
        return [self._result(result, like) for result, like in zip(results, self._about.results, strict=True)]

    def _spec(self, key: Any, given: Sequence[Any]) -> Any:
        digest, autocast, *_ = key
        at = iter(range(len(given)))
        items = tuple(
            composite_host.plain(value) if number in self._numbers else ("tensor", next(at))
            for number, value in enumerate(given)
        )
        return digest, 0, ("tuple", (("tuple", items), ("dict", ()))), autocast

    def _result(self, result: Any, like: Any) -> Any:
        if not isinstance(like, torch.Tensor):
            return result
        if not is_remote(like):
            return result.cpu()
        return result if like.requires_grad else result.detach()

    def _on_host(self) -> str:
        """Sends the graph, unless the host has it. Returns its digest."""
        stream = tensors.streams[self._device.index]
        if self._stream is not stream:
            graph: Any = _Packed(self._module, self._about.lifted, stream.device)  # unpickled as a Part
            is_tensor = [isinstance(value, torch.Tensor) for value in self._about.inputs]
            written = {sum(is_tensor[:at]) for at in self._about.written}
            made = functools.partial(
                graph_host.HostGraph,
                graph,
                stream.device,
                written,
                self._on_cpu,
                self._about.is_dynamic,
                self._options,
            )
            self._digest = remote_functions.send_module(stream, made)
            self._stream = stream
        return self._digest


class _Packed:
    """Pickles a graph as its code, with the names of the host's devices, and without its tensors on devices."""

    def __init__(self, module: torch.fx.GraphModule, lifted: Sequence[str], device: str) -> None:
        self._module = module
        self._lifted = lifted
        self._device = device

    def __reduce__(self) -> Any:
        code = self._copy().python_code("self")
        names = {node.target for node in self._module.graph.nodes if node.op in ("get_attr", "call_module")}
        attributes = {}
        for name in names.difference(self._lifted):
            value = _attribute(self._module, name)
            nested = isinstance(value, torch.fx.GraphModule)
            attributes[name] = _Packed(value, (), self._device) if nested else value
        return graph_host.Part, (code.src, code.globals, attributes)

    def _copy(self) -> torch.fx.Graph:
        """The graph, with inputs instead of the tensors that are attributes."""
        copy, known = torch.fx.Graph(), {}
        nodes = list(self._module.graph.nodes)
        for node in nodes:
            if node.op == "placeholder":
                known[node] = copy.placeholder(node.name)
        lifted = {name: copy.placeholder(f"lifted_{at}") for at, name in enumerate(self._lifted)}
        for node in nodes:
            if node.op == "get_attr" and node.target in lifted:
                known[node] = lifted[node.target]
            elif node.op != "placeholder":
                known[node] = made = copy.node_copy(node, known.__getitem__)
                made.args = map_aggregate(made.args, self._there)
                made.kwargs = map_aggregate(made.kwargs, self._there)
                if made.target is _CHECKPOINT:
                    made.target = torch.utils.checkpoint.checkpoint  # the operator needs a graph, and the host has code
                if made.target is torch.amp.autocast_mode._enter_autocast and made.args[1] is None:
                    made.args = (made.args[0], torch.get_autocast_dtype(TYPE), *made.args[2:])
        return copy

    def _there(self, value: Any) -> Any:
        """The host's device for one of this program."""
        if isinstance(value, torch.device) and value.type == TYPE:
            return torch.device(self._device)
        if type(value) is str and _OURS.fullmatch(value):
            return self._device if ":" in value else self._device.partition(":")[0]
        return value
