"""JSON and number arrays as bytes. Any value gets a JSON form; what JSON can express comes back equal."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import orjson


def _form(value: Any) -> object:
    if not isinstance(value, type):
        if hasattr(value, "model_dump"):  # pydantic, LangChain's messages too
            return value.model_dump()
        if dataclasses.is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    return _repr(value)


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - the boundary to the value's own method
        return f"<{type(value).__name__}>"


_ENCODER = json.JSONEncoder(default=_form, ensure_ascii=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """Return ``value`` as JSON. Objects become their fields (dataclasses, pydantic), else their repr."""
    try:
        text = _ENCODER.encode(value)
    except Exception:  # noqa: BLE001 - keys that JSON cannot have, a value that contains itself, or a method of it that raises
        text = _ENCODER.encode(_repr(value))
    return text.encode("utf-8", "surrogatepass")


def is_json(value: object) -> bool:
    """Return whether ``from_json(to_json(value))`` has the same values and types: no tuples, objects or non-string keys."""
    try:
        return _is_json(value)
    except RecursionError:  # it contains itself
        return False


def _is_json(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, int, float, bool)


def request_to_json(value: object) -> bytes:
    """Return a part of a request as JSON, faster; requests come as JSON without NaN, which orjson would make null."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return to_json(value)


def from_json(data: bytes) -> Any:
    """Return the value passed to ``to_json``, tuples as lists. Raises ValueError if ``data`` is not JSON."""
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (AttributeError, ValueError, RecursionError) as error:  # None; not JSON
        raise ValueError(f"expected JSON, got {data!r:.100}: {error}") from error


def object_from_json(data: bytes | None) -> dict[str, Any]:
    """Return a JSON object, empty for None. Raises TypeError for other JSON."""
    return {} if data is None else {**from_json(data)}


def text_to_column(text: str | None) -> str | bytes | None:
    """Return text as SQLite can hold it: as bytes if it has half of a surrogate pair, which UTF-8 lacks."""
    if text is None:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32. Raises OverflowError for ids that do not fit."""
    return array("i", ids).tobytes()  # a third of numpy's time for a tuple


def ids_from_bytes(data: bytes) -> tuple[int, ...]:
    """Return the token ids of ``ids_to_bytes``."""
    return tuple(np.frombuffer(data, dtype=np.int32).tolist())


def floats_to_bytes(values: Sequence[float]) -> bytes:
    """Return numbers as float32 if each of them is one (an engine's are), else as float64."""
    exact = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    same = bool((short == exact).all()) or np.array_equal(short, exact, equal_nan=True)
    return (short if same else exact).tobytes()


def floats_from_bytes(data: bytes, count: int) -> tuple[float, ...]:
    """Return the ``count`` numbers of ``floats_to_bytes``."""
    return tuple(np.frombuffer(data, dtype=np.float32 if len(data) == 4 * count else np.float64).tolist())
