"""The kernels of remote devices: for each operator a function that turns a call into an instruction.

An operator is planned once for each kind of arguments: their layouts, and the values that its results' layout may
depend on. PyTorch computes the layout of the results with tensors on its meta device, so that errors in shapes and
dtypes are raised at once. The host is sent the plan; afterwards a call is the plan's number and the operands.

The source of a kernel is generated from the operator's schema: looking at every argument's type in every call would
take several times as long.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, Final

import torch

from skyfab._util.signals import SIGNAL_GUARD
from skyfab.device import meta, tensors
from skyfab.device.arguments import (
    common_device,
    generator_operand,
    move_indices,
    refuse_lazy,
    refuse_overlap,
    resolve,
)
from skyfab.device.plans import Plan, before_plan, finish, new_cache, new_plan
from skyfab.device.storages import by_address
from skyfab.device.tensors import TYPE, is_remote, operand, operands
from skyfab.host.device import wire

_NUMBERS: Final = frozenset((int, float, bool, complex))
_PARAMETERS: Final = frozenset(
    ("number", "float", "Optional[number]", "Optional[float]", "List[number]", "List[float]", "Optional[List[float]]")
)
"""Types of arguments on whose values the layout of results does not depend: they are operands."""
_TENSOR_LISTS: Final = frozenset(
    ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]", "Optional[List[Optional[Tensor]]]")
)
_INDEXED: Final = frozenset(
    ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
)
"""Operators whose second argument is a list of indices. Only with masks does the shape depend on values."""
_VALUED: Final = frozenset(("arange", "linspace", "logspace", "range"))
"""Factories whose numbers decide the shape."""


_WRITES_OVER: Final = frozenset(
    ("fill_", "zero_", "masked_fill_", "index_fill_", "index_put_", "_index_put_impl_", "tril_", "triu_", "threshold_")
)
"""Operators that PyTorch lets write to tensors whose elements share memory."""
_LAZY: Final = ("Conjugate", "Negative")
"""Dispatch keys of views that are conjugated or negated when they are read. PyTorch does so before most kernels; those
that have a kernel of their own for such a key are given the views as they are."""
_PHYSICAL: Final = frozenset(("conj_physical_", "neg_"))
"""They do the same with the memory of such a view as with that of any tensor."""


_MISSING: Final = object()
"""The default of an argument that was not given."""


class _Result:
    """The result of a call for which no plan could be made."""

    def __init__(self, value: Any) -> None:
        self.value = value


# ---- generated kernels


_UNWRITTEN: Final = "def kernel(*args, **kwargs):\n    write()\n    return kernel(*args, **kwargs)"


def make_kernel(op: Any) -> Callable[..., Any]:
    """The kernel of an operator. It is generated when it is called first: there are many, and a program uses few."""

    def write() -> None:
        written = _write(op, kernel)
        scope.update(written.__globals__)
        scope["kernel"] = kernel
        kernel.__defaults__, kernel.__kwdefaults__ = written.__defaults__, written.__kwdefaults__
        kernel.__code__ = written.__code__  # last: another thread may be calling it

    scope: dict[str, Any] = {"write": write}
    exec(_compiled(_UNWRITTEN), scope)
    kernel: FunctionType = scope["kernel"]
    return kernel


def _write(op: Any, kernel: Callable[..., Any]) -> FunctionType:
    """Generates the kernel of an operator. `kernel` is what it will be called as."""
    plans = new_cache()
    scope: dict[str, Any] = {
        "MISSING": _MISSING,
        "NUMBERS": _NUMBERS,
        "Result": _Result,
        "find": by_address.get,
        "finish": finish,
        "make": functools.partial(_plan_call, op, kernel, plans),
        "move_indices": move_indices,
        "operand": operand,
        "operands": operands,
        "plans": plans,
        "view": tensors.view,
        "add_generator": generator_operand,
        "resolve": resolve,
        "refuse_lazy": refuse_lazy,
    }
    exec(_compiled(_source(op)), scope)
    return scope["kernel"]  # type: ignore[no-any-return]


def _source(op: Any) -> str:
    """The source of an operator's kernel."""
    schema, name = op._schema, _name(op)
    is_lazy = name not in _PHYSICAL and any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _LAZY
    )
    parameters: list[str] = []
    names: list[str] = []
    lines: list[str] = ["a1 = move_indices(a0, a1)"] if name in _INDEXED else []
    for at, argument in enumerate(schema.arguments):
        word = f"a{at}"
        if argument.kwarg_only:
            if "*" not in parameters:
                parameters.append("*")
            word = argument.name
        names.append(word)
        parameters.append(f"{word}=MISSING" if argument.has_default_value() else word)
        if is_lazy and str(argument.type) == "Tensor":
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            lines += [
                f"if {word}.is_conj() or {word}.is_neg():",
                f"    {word} = {'refuse_lazy' if is_written else 'resolve'}({word})",
            ]
        lines += _lines(str(argument.type), word, at, is_operand=name not in _VALUED)
    args = f"({', '.join(names)},)" if names else "()"
    keys = "".join(f"k{at}, " for at in range(len(names)))
    return "\n".join(
        [
            f"def kernel({', '.join(parameters)}):",
            "    _instruction = [0]",
            *(f"    {line}" for line in lines),
            f"    _key = ({keys})",
            "    _plan = plans.get(_key)",
            "    if _plan is None:",
            f"        _plan = make({args}, _key)",
            "        if type(_plan) is Result:",
            "            return _plan.value",
            "    _instruction[0] = _plan.number",
            "    _single = _plan.single",
            "    if _single is None:",
            f"        return finish(_plan, _instruction, {args})",
            "    _tensor, _id = _single.new()",
            "    _instruction.append(_id)",
            "    _plan.stream.emit(_instruction)",
            "    return _tensor",
        ]
    )


def _plan_call(
    op: Any, kernel: Callable[..., Any], plans: dict[Any, Plan], values: Sequence[Any], key: Any
) -> Plan | _Result:
    """A new plan for a call with these values; its result, if there can be no plan."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument, value in zip(op._schema.arguments, values, strict=True):
        if value is not _MISSING:
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)  # without gaps: PyTorch leaves out the last ones only
    name = _name(op)
    if name in _INDEXED:
        is_dynamic = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        for _ in filter(lambda t: t is not None and t.dtype is torch.uint8, args[1]):
            text = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."
            warnings.warn(text, stacklevel=3)  # as PyTorch does: the host's warning goes to its output
    else:
        is_dynamic = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    plan = None if is_dynamic else _make_plan(op, args, kwargs, is_operand=name not in _VALUED)
    if plan is None:
        return _Result(execute_dynamic(op, args, kwargs))
    if plan == "again":
        return _Result(kernel(*args, **kwargs))
    plans[key] = plan
    return plan  # type: ignore[no-any-return]


@functools.cache
def _compiled(source: str) -> CodeType:
    """Many operators have arguments of the same types, and so the same source."""
    return compile(source, "<kernel of a remote device>", "exec")


def _lines(kind: str, word: str, at: int, *, is_operand: bool) -> list[str]:
    """The lines of a kernel that add an argument to the plan's key (``k0``, ``k1`` …) and to the instruction."""
    key = f"k{at}"
    if kind in ("Tensor", "Optional[Tensor]"):
        return [
            f"if type({word}) in NUMBERS:",
            f"    {key} = type({word})",
            f"    _instruction.append({word})",
            f"elif {word} is None or {word} is MISSING:",
            f"    {key} = {word}",
            f"elif (_storage := find({word}.data_ptr())) is None:",
            f"    {key}, _id = operand({word})",
            "    _instruction.append(_id)",
            f"elif {word}.shape == ({key} := _storage.layout).shape and {word}.stride() == {key}.stride"
            f" and {word}.dtype is {key}.dtype:",
            "    _instruction.append(_storage.id)",
            "else:",
            f"    {key}, _id = view({word}, _storage, 0)",
            "    _instruction.append(_id)",
        ]
    if kind in _TENSOR_LISTS:
        return [f"{key} = {word} if {word} is None or {word} is MISSING else operands({word}, _instruction)"]
    if kind in ("Generator", "Optional[Generator]"):
        return [f"{key} = {word} if {word} is None or {word} is MISSING else add_generator({word}, _instruction)"]
    if kind in _PARAMETERS and is_operand:
        return [
            f"if {word} is None or {word} is MISSING:",
            f"    {key} = {word}",
            f"elif type({word}) is list or type({word}) is tuple:",
            f"    {key} = tuple(map(type, {word}))",
            f"    _instruction.append(tuple({word}))",
            "else:",
            f"    {key} = type({word})",
            f"    _instruction.append({word})",
        ]
    if "List" in kind:
        return [f"{key} = tuple({word}) if type({word}) is list else {word}"]
    if kind in _PARAMETERS:
        return [f"{key} = (type({word}), {word} or repr({word}))"]  # 0.0 and -0.0 are equal, too
    if kind in ("int", "Optional[int]", "bool", "Optional[bool]"):
        return [f"{key} = (type({word}), {word})"]  # True and 1 are equal, and not the same argument
    return [f"{key} = {word}"]


# ---- plans


def _make_plan(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_operand: bool) -> Any:
    """A new plan; None if PyTorch cannot tell the layout of the results; "again" if an out= tensor was resized."""
    before_plan()
    if kwargs.get("layout") not in (None, torch.strided):
        raise NotImplementedError(f"{_name(op)}: a {TYPE} device has dense tensors only, not layout={kwargs['layout']}")
    meta.check_arguments(_name(op), args)
    stream = tensors.streams[common_device(args, kwargs)]
    _require_remote_results(op, args, kwargs)
    try:
        with SIGNAL_GUARD:  # PyTorch imports much when this is called first, and half an import stays one
            result, meta_args, meta_kwargs = meta.predict(op, args, kwargs, stream.device)
            meta.check_cast(op, _name(op), meta_args, meta_kwargs)
    except NotImplementedError:
        return None
    except AssertionError as error:  # what a kernel checks raises RuntimeError
        raise RuntimeError(str(error)) from None
    except RuntimeError as error:
        if _name(op) not in _INDEXED:
            raise
        raise _index_error(str(error), args[1]) from None
    for output in _flat(result if isinstance(result, tuple) else (result,)):
        if isinstance(output, torch.Tensor) and output.layout is not torch.strided:
            raise NotImplementedError(f"{_name(op)}: a {TYPE} device has dense tensors only, not {output.layout}")
    resized = False
    for real, predicted in zip(
        _flat((*args, *kwargs.values())), _flat((*meta_args, *meta_kwargs.values())), strict=True
    ):
        if is_remote(real) and predicted.shape != real.shape:
            real.resize_(predicted.shape)
            resized = True
    if resized:
        return "again"
    outputs: list[torch.Tensor | None] = []

    def add(output: torch.Tensor | None) -> int:
        outputs.append(output)
        return len(outputs) - 1

    returns = op._schema.returns
    results: list[Any] = []
    for returned, output in zip(returns, (result,) if len(returns) == 1 else result or (), strict=True):
        if returned.alias_info is not None and returned.alias_info.is_write:
            results.append(("argument", _written_argument(op, returned)))
        elif isinstance(output, list | tuple):
            results.append([add(item) for item in output])
        elif isinstance(output, torch.Tensor) or output is None:
            results.append(add(output))
        else:
            return None
    template = _template(op, args, kwargs, is_operand=is_operand)
    return new_plan(stream, op.name(), template, outputs, results or None)


def _index_error(text: str, indices: Sequence[Any]) -> IndexError:
    """What kernels raise for indices that cannot be used. PyTorch's meta device raises a RuntimeError."""
    if "broadcast" in text:
        shapes = ", ".join(str([*index.shape]) for index in indices if index is not None)
        text = f"shape mismatch: indexing tensors could not be broadcast together with shapes {shapes}"
    return IndexError(text)


def _flat(values: Sequence[Any]) -> list[Any]:
    """The values, with the items of lists instead of the lists."""
    return [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]


def _require_remote_results(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises RuntimeError if something would be written into this machine's memory: the host only has a copy.

    Also if it would be written to elements that share memory.
    """
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for value in _flat((args[at] if at < len(args) else kwargs.get(argument.name),)):
                if isinstance(value, torch.Tensor) and not is_remote(value):
                    raise RuntimeError(
                        f"{op._schema.name} of tensors on a {TYPE} device cannot write into one on {value.device}"
                    )
                if isinstance(value, torch.Tensor) and _name(op) not in _WRITES_OVER:
                    refuse_overlap(value)


def _name(op: Any) -> str:
    return op._schema.name.removeprefix("aten::")  # type: ignore[no-any-return]


def _written_argument(op: Any, returned: Any) -> int:
    sets = [argument.alias_info and argument.alias_info.before_set for argument in op._schema.arguments]
    return sets.index(returned.alias_info.before_set)


def _template(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_operand: bool) -> tuple[Any, Any]:
    """The arguments of a plan: what is an operand, and what is fixed."""
    arguments = {argument.name: str(argument.type) for argument in op._schema.arguments}
    kinds = list(arguments.values())

    def encode(value: Any, kind: str) -> Any:
        if isinstance(value, torch.Tensor):
            return (wire.TENSOR,) if is_remote(value) else (wire.SCALAR_TENSOR,)
        if is_operand and type(value) in _NUMBERS and (kind in _PARAMETERS or "Tensor" in kind):
            return (wire.VALUE,)
        if isinstance(value, list | tuple):
            if is_operand and kind in _PARAMETERS:
                return (wire.VALUE,)
            return (wire.LIST, tuple(encode(item, "") for item in value))
        if isinstance(value, torch.Generator):
            return (wire.GENERATOR_ID,)
        if isinstance(value, torch.device):
            return (wire.DEVICE,)
        return (wire.CONSTANT, value)

    return (
        tuple(encode(value, kinds[at]) for at, value in enumerate(args)),
        tuple((name, encode(value, arguments[name])) for name, value in kwargs.items()),
    )


# ---- operators whose results depend on values


def execute_dynamic(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Executes an operator on the host and waits: only the host can tell the shape of its results."""
    _require_remote_results(op, args, kwargs)
    stream = tensors.streams[common_device(args, kwargs)]
    template = _template(op, args, kwargs, is_operand=False)
    found: list[Any] = []
    for value in _flat((*args, *kwargs.values())):
        if isinstance(value, torch.Tensor):
            found.append(operand(value)[1])
        elif isinstance(value, torch.Generator):
            generator_operand(value, found)
    first = tensors.new_block()
    value = tensors.result_of(stream, [wire.DYNAMIC, op.name(), *template, found, first], first)
    returns = op._schema.returns
    if not returns:
        return None
    results = [
        _write_back(op, returned, result, args, kwargs)
        for returned, result in zip(returns, (value,) if len(returns) == 1 else value or (), strict=True)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _write_back(op: Any, returned: Any, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call returns for one result of the host: the argument that it was written into, if there is one."""
    if returned.alias_info is None or not returned.alias_info.is_write:
        return result
    at = _written_argument(op, returned)
    target = args[at] if at < len(args) else kwargs[op._schema.arguments[at].name]
    if target.shape != result.shape:  # the host has resized its own; in this program it becomes another one
        target.resize_(result.shape).copy_(result)
    return target
