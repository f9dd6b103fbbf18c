"""Composite operators in a device's worker: one instruction each, for which PyTorch would need many.

A function whose backward needs what its forward has computed returns a handle: an empty tensor that holds the autograd
graph of the forward. The client frees it like any other tensor, and with it the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from skyfab.errors import UsageError
from skyfab.host.device import host_results

Tensors = Sequence[torch.Tensor | None]
_PLAIN: Final = frozenset(
    {type(None), bool, int, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.device}
)


def linear_backward(tensors: Sequence[torch.Tensor], mask: Sequence[bool]) -> Tensors:
    """The gradients of input, weight and bias, where `mask` asks for them. `tensors`: input, gradient, weight."""
    x, grad, weight = tensors
    if weight.dim() == 1:  # the result has no dimension for its one output
        grad = grad.unsqueeze(-1)
    flat, inputs = _rows(grad), _rows(x)
    return (
        (flat @ _rows(weight)).view(x.shape) if mask[0] else None,
        (flat.t() @ inputs).view(weight.shape) if mask[1] else None,
        flat.sum(0).view(weight.shape[:-1]) if mask[2] else None,
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """As a matrix. `reshape` cannot infer the number of rows where there is no column."""
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0)


def rms_norm_backward(tensors: Sequence[Any], shape: Sequence[int], mask: Sequence[bool]) -> Tensors:
    """The gradients of input and weight, where `mask` asks for them: CPUs have no operator for it.

    `tensors`: gradient, input, the reciprocal of its root mean square, and weight.
    """
    grad, x, rstd, weight = tensors
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm_backward(grad, x, shape, rstd, weight, mask)  # type: ignore[no-any-return]
    normed, grad = x * rstd, grad.to(rstd.dtype)
    grad_normed = grad if weight is None else grad * weight
    inner = tuple(range(-len(shape), 0))
    centered = grad_normed - normed * (grad_normed * normed).mean(inner, keepdim=True)
    outer = tuple(range(x.dim() - len(shape)))
    return (
        (centered * rstd).to(x.dtype) if mask[0] else None,
        ((grad * normed).sum(outer) if outer else grad * normed).to(weight.dtype) if mask[1] else None,
    )


def _with_graph(function: Callable[..., Any], tensors: Tensors, wanted: Sequence[bool]) -> tuple[torch.Tensor, ...]:
    """Calls a function of tensors; returns its outputs, and a handle for `backward` if a gradient is wanted."""
    if not any(wanted):
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return (*outputs, torch.empty(0))
    with torch.enable_grad():
        inputs = [
            tensor if tensor is None else tensor.detach().requires_grad_(is_wanted)
            for tensor, is_wanted in zip(tensors, wanted, strict=True)
        ]
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    return (*(output.detach() for output in outputs), _handle(outputs, inputs, wanted))


def _handle(outputs: Sequence[torch.Tensor], inputs: Tensors, wanted: Sequence[bool]) -> torch.Tensor:
    handle = torch.empty(0)
    handle.graph = (outputs, [tensor for tensor, is_wanted in zip(inputs, wanted, strict=True) if is_wanted])
    return handle


def backward(handles: Sequence[torch.Tensor], grads: Tensors, is_last: bool) -> Tensors:
    """The gradients of the inputs for which they were wanted, in order. The last backward frees what it needs."""
    outputs, inputs = handles[0].graph
    return _gradients(outputs, inputs, grads, retain_graph=not is_last or hasattr(handles[0], "shared"))


def backward_again(handles: Sequence[torch.Tensor], grads: Tensors, wanted: Sequence[bool]) -> Tensors:
    """The same, and a handle for the derivatives of these gradients, by the inputs and by `grads`."""
    outputs, inputs = handles[0].graph
    new = [None if grad is None else grad.detach().requires_grad_() for grad in grads]
    found = _gradients(outputs, inputs, new, create_graph=True)
    handle = _handle(found, [*inputs, *(grad for grad in new if grad is not None)], wanted)
    handles[0].shared = handle.shared = True  # they have nodes in common, which end with both
    return (*(grad.detach() for grad in found), handle)


def _gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Tensors, **options: bool
) -> tuple[torch.Tensor, ...]:
    both = zip(outputs, grads, strict=True)
    used = [(output, grad) for output, grad in both if grad is not None and output.requires_grad]
    if not used:
        return tuple(map(torch.zeros_like, inputs))
    with torch.enable_grad():
        found = torch.autograd.grad(
            [output for output, _ in used], inputs, [grad for _, grad in used], allow_unused=True, **options
        )
        dense = [
            torch.zeros_like(t) if grad is None else grad.contiguous() for grad, t in zip(found, inputs, strict=True)
        ]
        return _apart(dense, grads)


def _apart(found: Sequence[torch.Tensor], others: Tensors) -> tuple[torch.Tensor, ...]:
    """The gradients, none of which shares memory with another one: each is a tensor of its own for the client."""
    memories = {tensor.untyped_storage().data_ptr() for tensor in others if tensor is not None}
    results = []
    for tensor in found:
        count = len(memories)
        memories.add(tensor.untyped_storage().data_ptr())
        results.append(tensor if len(memories) > count else tensor.clone())
    return tuple(results)


def template(
    value: Any, into: list[torch.Tensor], *, is_argument: bool = True, here: torch.device | None = None
) -> Any:
    """A value with numbers instead of its tensors, which are appended to `into`. It is hashable.

    `here` is the program's name of the device. Raises UsageError for arguments of other types.
    """
    if isinstance(value, torch.Tensor):
        if is_argument and value.dim() == 1 and value.device.type == "cpu" and not value.requires_grad:
            # as the sizes of batches in a packed sequence
            return ("numbers", (value.dtype, tuple(map(plain, value.tolist()))))
        if value.layout is torch.sparse_coo:
            parts = {"indices": value._indices(), "values": value._values()}
            return ("sparse", (template(parts, into), tuple(value.shape), value.is_coalesced()))
        into.append(value)
        return ("tensor", len(into) - 1)
    if isinstance(value, dict):
        if is_argument:
            for key in value:
                _require_plain(key)
        items = [(key, template(item, into, is_argument=is_argument, here=here)) for key, item in value.items()]
        return ("dict", tuple(items))
    if isinstance(value, list | tuple):
        items = [template(item, into, is_argument=is_argument, here=here) for item in value]
        return ("list" if isinstance(value, list) else "tuple", tuple(items))
    if is_argument:
        _require_plain(value)
        if here is not None and isinstance(value, torch.device) and value.type == here.type:
            if (value.index or 0) != here.index:
                raise UsageError(f"an argument of a module on {here} is {value}", hint=f"pass {str(here)!r}")
            return ("device", None)
    return plain(value)


def _require_plain(value: object) -> None:
    """Others would be sent once, as they are in the first call, and a host may be unable to unpickle them."""
    if type(value) not in _PLAIN and not isinstance(value, float | complex):
        raise UsageError(
            f"unsupported type of an argument: {type(value).__qualname__}: expected tensors, numbers, strings, dtypes, "
            "devices, None, or lists, tuples and dicts of them",
            hint="pass the tensors and numbers of the object, or use sky.run_on",
        )


def plain(value: Any) -> Any:
    """A template of a value: True, 1 and 1.0 are equal, and not the same argument.

    Some numbers are text: 0.0 and -0.0 are equal, and NaN is not equal to itself.
    """
    if isinstance(value, float):  # also of a subclass, as NumPy's
        return ("float", repr(float(value)))
    if isinstance(value, complex):
        return ("complex", repr(complex(value)))
    return ("plain", (type(value).__name__, value))


def fill_in(made: Any, tensors: Sequence[Any]) -> Any:
    """The value of a template."""
    kind, value = made
    if kind == "tensor":
        return tensors[value]
    if kind == "numbers":
        return torch.tensor([fill_in(item, ()) for item in value[1]], dtype=value[0])
    if kind == "sparse":
        parts, size, is_coalesced = value
        options = {"size": size, "is_coalesced": is_coalesced, "check_invariants": False}
        return torch.sparse_coo_tensor(**fill_in(parts, tensors), **options)
    if kind == "dict":
        return {key: fill_in(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(fill_in(item, tensors) for item in value)
    if kind == "device":
        return tensors[-1].device  # that of the module's own
    if kind in ("float", "complex"):
        return (float if kind == "float" else complex)(value)
    return value[1]


def operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def composite(tensors: Tensors, spec: Any, wanted: Sequence[bool]) -> Tensors:
    """Calls an operator that PyTorch composes of others: its name, and a template of its arguments."""
    name, arguments = spec
    op = operator(name)

    def function(*values: torch.Tensor) -> Any:
        args, kwargs = fill_in(arguments, values)
        return op(*args, **kwargs)

    return _with_graph(function, tensors, wanted)


def sparse(tensors: Tensors, spec: Any) -> Any:
    """The same for sparse tensors. A sparse result is returned as its parts."""
    name, arguments = spec
    args, kwargs = fill_in(arguments, tensors)
    found = operator(name)(*args, **kwargs)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.sparse_coo:
        return found
    parts = {"indices": found._indices(), "values": found._values()}
    return {**parts, "size": tuple(found.shape), "is_coalesced": found.is_coalesced()}


def cast_linear(tensors: Tensors, dtype: str) -> Tensors:
    """A linear layer in lower precision. `tensors`: input, weight and bias."""
    lower = getattr(torch, dtype)
    return (torch.nn.functional.linear(*(None if t is None else t.to(lower) for t in tensors)),)


def cast_linear_backward(tensors: Sequence[torch.Tensor], mask: Sequence[bool], dtype: str) -> Tensors:
    """Its gradients, in the dtypes of input, weight and bias. `tensors`: input, gradient, weight."""
    x, grad, weight = tensors
    lower = getattr(torch, dtype)
    found = linear_backward((x.to(lower), grad.to(lower), weight.to(lower)), mask)
    return tuple(None if t is None else t.to(like.dtype) for t, like in zip(found, (x, weight, weight), strict=True))


# ---- modules

Places = Sequence[tuple[dict[str, Any], str]]
"""The dicts that have a tensor, each with the tensor's name in it: a tensor may be shared."""


class HostModule:
    """A module of the client. It does not keep its parameters and buffers, which come with each call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        own = own_tensors(module)
        self._places = [places for _, places in own]
        self._set([None] * len(own))
        self._buffers = [at for at, (tensor, _) in enumerate(own) if not isinstance(tensor, torch.nn.Parameter)]

    def call(self, spec: Any, tensors: Sequence[Any]) -> Any:
        """Calls it with its inputs, then its parameters and buffers.

        The specification has its digest, how many of the tensors are its own, the arguments, and autocast's dtype.
        """
        _, own, arguments, autocast = spec
        count = len(tensors) - own
        args, kwargs = fill_in(arguments, tensors)
        device = self.device(tensors)
        with torch.autocast(device.type, getattr(torch, autocast)) if autocast else contextlib.nullcontext():
            with self._with_tensors(tensors[count:]):
                return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def _with_tensors(self, tensors: Sequence[Any]) -> Iterator[None]:
        try:
            self._set(tensors)
            yield
            self._write_back(tensors)
        finally:
            self._set([None] * len(tensors))

    def _write_back(self, tensors: Sequence[Any]) -> None:
        """Copies tensors that have replaced buffers into them. Raises RuntimeError for what cannot be copied."""
        for places, tensor in zip(self._places, tensors, strict=True):
            for holder, name in places:
                found = holder.get(name)
                if found is tensor:
                    continue
                if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
                    raise RuntimeError(
                        f"forward has replaced {name!r} by something of another shape or dtype: change its elements, "
                        "or call the module without sky.remote"
                    )
                with torch.no_grad():
                    tensor.copy_(found)

    def _set(self, tensors: Sequence[Any]) -> None:
        for places, tensor in zip(self._places, tensors, strict=True):
            for holder, name in places:
                holder[name] = tensor

    def written(self, inputs: int) -> Collection[int]:
        """Indices of tensors that a call may change: graphs know theirs, others may change inputs and buffers."""
        known: Collection[int] | None = getattr(self.module, "written", None)
        return {*range(inputs), *(inputs + at for at in self._buffers)} if known is None else known

    def device(self, tensors: Sequence[Any]) -> torch.device:
        """Its device; graphs (graph_host.py) name theirs, others have tensors."""
        return getattr(self.module, "device_here", None) or tensors[-1].device


def own_tensors(module: torch.nn.Module) -> list[tuple[torch.Tensor, Places]]:
    """The parameters and buffers of a module, each once, in the same order on client and host."""
    found: dict[int, tuple[torch.Tensor, list[tuple[dict[str, Any], str]]]] = {}
    for part in module.modules():
        for holder in (part._parameters, part._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, []))[1].append((holder, name))
    return list(found.values())


MODULES: Final[dict[str, HostModule]] = {}
"""By digest."""


def module(tensors: Tensors, spec: Any, wanted: Sequence[bool], expected: Any) -> Tensors:
    """Calls a module; returns the bases of its results (host_results.py), and a handle.

    Raises RuntimeError if it returns something else than the client expects, besides the values of tensors.
    """
    bases, *found, _, _ = module_first(tensors, spec, wanted)
    if repr(tuple(found)) != repr(expected):  # equal also where a number is NaN
        raise RuntimeError(
            "the module's result differs from that of its first call in numbers, structure or shared memory: call it "
            "without sky.remote, or with sky.run_on"
        )
    return bases


def module_first(
    tensors: Sequence[Any], spec: Any, wanted: Sequence[bool]
) -> tuple[Tensors, Any, Any, tuple[int, ...], str]:
    """The same, with the base of each result and which view of it the result is, and what the module returned.

    And the indices of the tensors that it has changed in place, and a notice for the user, if there is one.
    """
    structure: Any = None
    called = MODULES[spec[0]]

    def function(*values: torch.Tensor) -> Any:
        nonlocal structure
        results: list[torch.Tensor] = []
        structure = template(called.call(spec, values), results, is_argument=False)
        return tuple(results)

    before = list(map(host_results.version, tensors))
    *results, handle = _with_graph(function, tensors, wanted)
    changed = tuple(at for at, tensor in enumerate(tensors) if host_results.version(tensor) != before[at])
    results = [host_results.plain(result) for result in results]
    bases, locations = host_results.share(results, called.device(tensors), dict(enumerate(tensors)))
    return (*bases, handle), tuple(locations), structure, changed, getattr(called.module, "note", "")


def state_dict(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function that returns a module or a state dict; returns the state dict."""
    found = function(*args, **kwargs)
    return found.state_dict() if hasattr(found, "state_dict") else found


_FUNCTIONS: Final = (
    *(linear_backward, rms_norm_backward, cast_linear, cast_linear_backward),
    *(composite, sparse, module, module_first, backward, backward_again),
)
FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {f"sky::{function.__name__}": function for function in _FUNCTIONS}
"""What the client calls besides operators, by name."""
