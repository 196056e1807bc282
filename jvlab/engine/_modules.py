"""What torch keeps to itself of modules and tensors: their tables, and the memory below a view.

Tables are read and written as they lie: `register_parameter` refuses what vLLM does after loading, and
`named_parameters` leaves out what is None. No other file of this room looks behind torch's names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

Format = tuple[tuple[int, ...], str, tuple[int, ...]]
_TABLES = ("_parameters", "_buffers", "_modules")


def own_parameters(layer: Any) -> dict[str, Any]:
    """The layer's table of parameters; None is a name that has none."""
    return layer._parameters


def held_parameters(layer: Any) -> dict[str, Any]:
    """Those of the layer's own parameters that there are."""
    return {n: p for n, p in own_parameters(layer).items() if p is not None}


def own_buffers(layer: Any) -> dict[str, Any]:
    """The layer's table of buffers."""
    return layer._buffers


def own_modules(layer: Any) -> dict[str, Any]:
    """The layer's table of submodules."""
    return layer._modules


def memory_of(tensor: Any) -> int:
    """A number for the memory that a tensor lies in: views of one storage have the same."""
    return tensor.untyped_storage()._cdata


def users_of(storage: Any) -> int:
    """How many hold a tensor's storage, this object among them."""
    from torch._C import _storage_Use_Count

    return _storage_Use_Count(storage._cdata)


def dtype_name(tensor: Any) -> str:
    """`bfloat16` for a tensor of torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def format_of(tensor: Any) -> Format:
    """Shape, dtype and strides."""
    return tuple(tensor.shape), dtype_name(tensor), tuple(tensor.stride())


def as_integers(tensor: Any) -> Any:
    """The tensor's bits, as integers of the same width."""
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def packed_kernel(attributes: Mapping[str, Any]) -> Any:
    """A layer's matrix product, if its weight is packed: on CPUs, vLLM keeps that in a closure; else None."""
    kernel: Any = attributes.get("cpu_linear")
    code = getattr(kernel, "__code__", None)
    packed = code is not None and (code.co_freevars or kernel.__defaults__)
    return kernel if packed else None


def stand_in(layer: Any) -> Any:
    """A copy that shares everything with the layer, or with a method, except its tables."""
    made = copy.copy(layer)
    own = vars(made)
    own.update({table: dict(own[table]) for table in _TABLES if table in own})
    return made


def put(layer: Any, name: str, value: Any) -> None:
    """Set an attribute where the layer keeps it: submodules have a table of their own."""
    table = own_modules(layer)
    (table if name in table else vars(layer))[name] = value


def attributes(layer: Any) -> dict[str, Any]:
    """What the layer holds besides its tables."""
    return {name: value for name, value in vars(layer).items() if name not in _TABLES}
