"""Composite operators, such as attention: one instruction forward and one backward instead of many.

The host keeps the autograd graph of the forward for the backward, under a handle that is freed like a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device import meta, plans, tensors
from skyfab.device.arguments import common_device, resolve
from skyfab.device.kernels import make_kernel
from skyfab.device.plans import finish
from skyfab.device.tensors import is_plain, is_remote, operands
from skyfab.host.device import composite_host, wire

_aten: Final = torch.ops.aten
_cache: Final = plans.new_cache()
_OPERATORS: Final = (
    _aten.scaled_dot_product_attention.default,
    *(packet.input for packet in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)),
    *(packet.data for packet in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)),
    _aten.lstm_cell.default,
    _aten.gru_cell.default,
    _aten.rnn_tanh_cell.default,
    _aten.rnn_relu_cell.default,
)


def undifferentiated() -> dict[str, Callable[..., Any]]:
    """Kernels below autograd, by operator."""
    return {
        "linear": make_kernel(_aten.linear.default),
        "linear_backward": lambda *args: _linear_gradients("linear_backward", *args),
        "_fused_rms_norm": make_kernel(_aten._fused_rms_norm.default),
        "_fused_rms_norm_backward": _rms_norm_gradients,
    }


def differentiable() -> dict[str, Callable[..., Any]]:
    """Kernels that have a gradient of their own, by operator."""
    return {op.name().removeprefix("aten::"): _composite(op) for op in _OPERATORS}


def call(
    name: str,
    args: Sequence[Any],
    outputs: Callable[[], Sequence[torch.Tensor | None]],
    device: torch.device,
    key: Any = None,
) -> tuple[Any, ...]:
    """Calls a function of the worker (composite_host.py).

    `args` are lists of tensors, and constants, which must be hashable. `outputs` makes meta tensors as the function
    will return them; `key` is what they depend on besides `args`.
    """
    instruction: list[Any] = [0]
    plain = _plain(args)  # kept until the instruction has been emitted
    keys = (name, device.index, key, *_operands(plain, instruction))
    plan = _cache.get(keys)
    if plan is None:
        plans.before_plan()
        stream = tensors.streams[_common_device(plain, device)]
        with SIGNAL_GUARD:
            made = outputs()
        template = (tuple(map(_template, plain)), ())
        plan = _cache[keys] = plans.new_plan(stream, f"sky::{name}", template, made, list(range(len(made))))
    instruction[0] = plan.number
    result = finish(plan, instruction, ())
    return result if isinstance(result, tuple) else (result,)


def call_first(name: str, args: Sequence[Any], device: torch.device) -> Any:
    """The same, and waits for what the function returns: only the host can tell its layouts."""
    operands_: list[Any] = []
    plain = _plain(args)  # kept until the instruction has been emitted
    _operands(plain, operands_)
    first = tensors.new_block()
    stream = tensors.streams[_common_device(plain, device)]
    template = tuple(map(_template, plain))
    return tensors.result_of(stream, [wire.DYNAMIC, f"sky::{name}", template, (), operands_, first], first)


def _plain(args: Sequence[Any]) -> list[Any]:
    """The arguments; tensors that are conjugated or negated when they are read are so no longer."""
    return [
        [resolve(t) if t is not None and (t.is_conj() or t.is_neg()) else t for t in value]
        if type(value) is list
        else value
        for value in args
    ]


def _operands(args: Sequence[Any], instruction: list[Any]) -> list[Any]:
    """Adds the operands to an instruction. Returns what a plan depends on."""
    return [operands(value, instruction) if type(value) is list else (type(value), value) for value in args]


def _common_device(args: Sequence[Any], device: torch.device) -> int:
    return common_device([*(value for value in args if type(value) is list), device], {})


def _template(value: Any) -> tuple[Any, ...]:
    """An argument of a plan."""
    return (wire.LIST, tuple(map(_kind, value))) if type(value) is list else (wire.CONSTANT, value)


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return (wire.CONSTANT, None)
    return (wire.TENSOR,) if is_remote(tensor) else (wire.SCALAR_TENSOR,)


def _linear_gradients(
    name: str, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool], *more: Any
) -> Any:
    """The gradients of input, weight and bias, where they are wanted."""

    def outputs() -> list[torch.Tensor | None]:
        kinds = ((x.shape, x.dtype), (weight.shape, weight.dtype), (weight.shape[:-1], weight.dtype))
        return [
            torch.empty(shape, dtype=dtype, device="meta") if is_wanted else None
            for (shape, dtype), is_wanted in zip(kinds, wanted, strict=True)
        ]

    return call(name, [[x, grad, weight], tuple(wanted), *more], outputs, x.device)


def _rms_norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], rstd: torch.Tensor, weight: Any, wanted: Sequence[bool]
) -> Any:
    """The gradients of input and weight, where they are wanted."""

    def outputs() -> list[torch.Tensor | None]:
        return [
            torch.empty(t.shape, dtype=t.dtype, device="meta") if is_wanted else None
            for t, is_wanted in zip((x, weight), wanted, strict=True)
        ]

    return call("rms_norm_backward", [[grad, x, rstd, weight], tuple(shape), tuple(wanted)], outputs, x.device)


class CastLinear(torch.autograd.Function):  # type: ignore[misc]
    """A linear layer in lower precision: the casts are part of the instruction, each way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        shape = (*x.shape[:-1], weight.shape[0])
        name = str(dtype).removeprefix("torch.")
        outputs = lambda: [torch.empty(shape, dtype=dtype, device="meta")]  # noqa: E731
        return call("cast_linear", [[x, weight, bias], name], outputs, x.device)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        name, wanted = str(ctx.dtype).removeprefix("torch."), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph: operator by operator, so that they can be differentiated again
            return (*composite_host.cast_linear_backward((x, grad, weight), wanted, name), None)
        return (*_linear_gradients("cast_linear_backward", x, grad, weight, wanted, name), None)


def _composite(op: Any) -> Callable[..., Any]:
    """A kernel that calls the whole operator on the host."""
    name = op.name()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found: list[torch.Tensor] = []
        spec = (name, composite_host.template((args, kwargs), found))
        if (
            not all(map(is_plain, found))  # torch.compile is tracing
            or torch._C._are_functorch_transforms_active()  # they cannot transform what the host differentiates
            or _only_math(op)
        ):
            return _like_devices(op, op.decompose(*args, **kwargs))
        device = next(tensor.device for tensor in found if is_remote(tensor))

        def forward(inputs: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Any:
            outputs = functools.partial(_predict, op, spec, inputs)
            *results, handle = call("composite", [list(inputs), spec, wanted], outputs, device)
            return results, handle

        result = keep_graph(forward, *found)
        return result if len(op._schema.returns) > 1 else result[0]

    return kernel


def _only_math(op: Any) -> bool:
    """Whether the program wants attention by ordinary operators, as for derivatives of its gradient."""
    cuda = torch.backends.cuda
    return op is _aten.scaled_dot_product_attention.default and not (
        cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    )


def _predict(op: Any, spec: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an operator returns, and the handle, as meta tensors."""
    args, kwargs = composite_host.fill_in(spec[1], [meta.to_meta(tensor) for tensor in inputs])
    result = _like_devices(op, op(*args, **kwargs))
    results = result if isinstance(result, tuple) else (result,)
    return [*results, torch.empty(0, device="meta")]


def _like_devices(op: Any, result: Any) -> Any:
    """A predicted result, with the strides that devices give it."""
    if op is _aten.scaled_dot_product_attention.default and result.dim() == 4:
        return result.transpose(1, 2).contiguous().transpose(1, 2)  # as the fast kernels of GPUs return it
    return result


def keep_graph(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Calls a function of tensors whose autograd graph the host keeps. Returns its results.

    It is called with the inputs, and for which of them a gradient is wanted. Returns the results, and a handle.
    """
    return _KeptGraph.apply(function, torch.is_grad_enabled(), *inputs)


class _KeptGraph(torch.autograd.Function):  # type: ignore[misc]
    """Such a call, as autograd records it; without gradients under `no_grad`, which `forward` itself cannot see."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], has_gradients: bool, *inputs: torch.Tensor) -> Any:
        ctx.wanted = ctx.needs_input_grad[2:] if has_gradients else (False,) * len(inputs)
        ctx.set_materialize_grads(False)
        results, handle = function(inputs, ctx.wanted)
        ctx.save_for_backward(handle, *(t for t, is_wanted in zip(inputs, ctx.wanted, strict=True) if is_wanted))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        handle, *inputs = ctx.saved_tensors
        find = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        found = iter(find(handle, list(grads), inputs))
        return (None, None, *(next(found) if is_wanted else None for is_wanted in ctx.wanted))


def _gradients(handle: torch.Tensor, grads: list[Any], inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradients of the inputs, from the graph that the host keeps."""
    is_last = not torch._C._autograd._get_current_graph_task_keep_graph()
    shapes = tuple((t.shape, t.dtype) for t in inputs)
    return call("backward", [[handle], grads, is_last], lambda: _like(inputs), handle.device, shapes)


def _differentiable_gradients(
    handle: torch.Tensor, grads: list[Any], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """The same with ``create_graph=True``: the host keeps the graph of these gradients, too."""
    shapes = tuple((t.shape, t.dtype) for t in inputs)

    def forward(given: Sequence[torch.Tensor], wanted: Sequence[bool]) -> Any:
        new = iter(given[len(inputs) :])
        arguments = [[handle], [grad if grad is None else next(new) for grad in grads], wanted]
        outputs = lambda: [*_like(inputs), torch.empty(0, device="meta")]  # noqa: E731
        *results, again = call("backward_again", arguments, outputs, handle.device, shapes)
        return results, again

    found: Sequence[torch.Tensor] = keep_graph(forward, *inputs, *(grad for grad in grads if grad is not None))
    return found


def _like(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in inputs]
