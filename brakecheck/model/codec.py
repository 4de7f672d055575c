"""Dataclasses to JSON and back. What is unknown (None) is absent from the JSON, never 0 and never null."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import typing
from typing import Any, Dict, Type, TypeVar

from .errors import BrakecheckError

T = TypeVar("T")
_hints = functools.lru_cache(maxsize=None)(typing.get_type_hints)  # evaluating annotations is slow


def encode(value: Any) -> Any:
    """Plain JSON data of a dataclass, mapping, sequence, enum or scalar. NaN and infinities become absent."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for field in dataclasses.fields(value):
            item = encode(getattr(value, field.name))
            if item is not None:
                out[field.name] = item
        return out
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dict):
        return {str(k): e for k, e in ((k, encode(v)) for k, v in value.items()) if e is not None}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(encode(v) for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def decode(cls: Type[T], data: Any, where: str = "$") -> T:
    """The dataclass `cls` from what `encode` made. Unknown fields are ignored (newer writers add fields);
    a missing required field or a value of the wrong type raises BrakecheckError naming the JSON path."""
    return typing.cast(T, _decode(cls, data, where))


def _decode(hint: Any, data: Any, where: str) -> Any:
    if hint is Any:
        return data
    origin = typing.get_origin(hint)
    if origin is typing.Union:
        options = typing.get_args(hint)
        if data is None and type(None) in options:
            return None
        rest = [o for o in options if o is not type(None)]
        for option in rest[:-1]:
            try:
                return _decode(option, data, where)
            except BrakecheckError:
                continue
        return _decode(rest[-1], data, where)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise _wrong(where, f"one of {', '.join(map(repr, typing.get_args(hint)))}", data)
        return data
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, data, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            raise _wrong(where, f"one of {', '.join(repr(m.value) for m in hint)}", data) from None
    if origin in (list, tuple):
        if not isinstance(data, (list, tuple)):
            raise _wrong(where, "a list", data)
        args = typing.get_args(hint)
        if origin is tuple and args and args[-1] is not Ellipsis:
            if len(args) != len(data):
                raise _wrong(where, f"a list of {len(args)}", data)
            return tuple(_decode(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(zip(args, data)))
        item = args[0] if args else Any
        return origin(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin is dict or hint is dict:
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        args = typing.get_args(hint) or (str, Any)
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in data.items()}
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(hint, type):
        if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
            raise _wrong(where, hint.__name__, data)
        return data
    raise TypeError(f"no decoder for {hint!r}")


def _decode_dataclass(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, f"an object ({cls.__name__})", data)
    hints = _hints(cls)
    values: Dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.name in data:
            values[field.name] = _decode(hints[field.name], data[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            optional = hints[field.name] is Any or type(None) in typing.get_args(hints[field.name])
            if not optional:
                raise BrakecheckError(
                    f"{cls.__name__} lacks the field {field.name!r}", f"{where}.{field.name}",
                    "write this file with the same or a newer brakecheck",
                )
            values[field.name] = None
    return cls(**values)


def _wrong(where: str, wanted: str, got: Any) -> BrakecheckError:
    return BrakecheckError(f"expected {wanted}, found {got!r:.80}", where, "correct the value")
