"""JSON and number arrays as bytes. Whatever an agent returns gets a JSON form; what JSON can say comes back equal."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Mapping, Sequence, Set
from types import NoneType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import orjson


class Damaged(ValueError):
    """What stands in the file cannot have been written there."""


@runtime_checkable
class _Model(Protocol):
    """Pydantic models, LangChain's messages among them."""

    def model_dump(self) -> Any: ...


def _form(value: object) -> object:
    if isinstance(value, _Model) and not isinstance(value, type):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Set):
        return list(value)
    return repr(value)


_ENCODER = json.JSONEncoder(default=_form, ensure_ascii=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """Return ``value`` as JSON. Objects become their fields (dataclasses, pydantic), else their repr."""
    try:
        text = _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError):
        # Keys that JSON cannot have, a value that holds itself: better told in words than lost.
        text = _ENCODER.encode(repr(value))
    return text.encode("utf-8", "surrogatepass")


def is_json(value: object) -> bool:
    """Return whether ``from_json(to_json(value))`` is the very same: no tuple, no key but text, no object."""
    try:
        return _says(value)
    except RecursionError:  # it holds itself
        return False


def _says(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _says(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_says, value))
    return value is None or type(value) in (str, int, float, bool)


def request_to_json(value: object) -> bytes:
    """Return a part of a request as JSON, faster; it came as JSON, which has no NaN (orjson would make it null)."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return to_json(value)


def from_json(data: bytes) -> Any:
    """Return what ``to_json`` was given, where JSON can say it; tuples come back as lists. Raises Damaged."""
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (AttributeError, ValueError, RecursionError) as error:  # no bytes; no JSON
        raise Damaged(f"it should be JSON and is {data!r:.100}: {error}") from error


def object_from_json(data: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a column, an empty one where there is none. Raises Damaged."""
    return {} if data is None else column(from_json(data), dict)


def column(value: Any, *kinds: type) -> Any:
    """Return what stands in a column; Damaged where it is none of ``kinds``: SQLite keeps anything anywhere."""
    if not isinstance(value, kinds):
        raise Damaged(f"{value!r:.100} stands where only {' or '.join(kind.__name__ for kind in kinds)} can")
    return value


def text_to_column(text: str | None) -> str | bytes | None:
    """Return text as SQLite can hold it: as bytes where it has half of a surrogate pair, which UTF-8 cannot say."""
    if text is None:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_from_column(value: str | bytes | None) -> str | None:
    """Return what ``text_to_column`` was given. Raises Damaged."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8", "surrogatepass")
        except ValueError as error:
            raise Damaged(f"it should be text: {error}") from error
    return column(value, str, NoneType)


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32. Raises OverflowError for ids that do not fit."""
    # A third of numpy's time for what comes as a tuple.
    return array("i", ids).tobytes()


def ids_from_bytes(data: bytes) -> tuple[int, ...]:
    """Return the token ids of ``ids_to_bytes``."""
    return tuple(np.frombuffer(data, dtype=np.int32).tolist())


def floats_to_bytes(values: Sequence[float]) -> bytes:
    """Return numbers as float32 where every one of them is a float32 (as an engine's are), else as float64."""
    exact = np.asarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):
        short = exact.astype(np.float32)
    same = bool((short == exact).all()) or np.array_equal(short, exact, equal_nan=True)
    return (short if same else exact).tobytes()


def floats_from_bytes(data: bytes, count: int) -> tuple[float, ...]:
    """Return the ``count`` numbers of ``floats_to_bytes``, exactly."""
    return tuple(np.frombuffer(data, dtype=np.float32 if len(data) == 4 * count else np.float64).tolist())
