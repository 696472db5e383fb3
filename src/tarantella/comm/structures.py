"""Nested structures: visiting all of one, naming what is where, and building one like it.

Dictionaries, lists, tuples, named tuples and None make up a structure, everything else in it is a
leaf. Dictionary entries are visited in the order of their keys' names, so that ranks which filled
a dictionary in different orders still agree.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Visits a structure from the outside in: each container, None and leaf, with its path.

    Example:
        >>> list(walk({"a": [1, 2]}))
        [('', {'a': [1, 2]}), ("'a'", [1, 2]), ("'a'/0", 1), ("'a'/1", 2)]
    """
    yield path, value
    for step, child in _children(value):
        yield from walk(child, f"{path}/{step}" if path else step)


def is_leaf(value: Any) -> bool:
    return value is not None and not isinstance(value, (Mapping, list, tuple))


def describe_container(value: Any) -> str:
    """Says what must agree between ranks about a container, apart from its children."""
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dict with keys ({', '.join(_keys(value))})" if value else "an empty dict"
    if _is_namedtuple(value):
        return f"a {type(value).__name__} with fields ({', '.join(value._fields)})"
    return f"a {'tuple' if isinstance(value, tuple) else 'list'} of {len(value)}"


def rebuild(value: Any, leaves: Iterator[Any]) -> Any:
    """Builds a structure like `value`, its leaves taken from `leaves` in the order of `walk`."""
    if value is None:
        return None
    if is_leaf(value):
        return next(leaves)
    if isinstance(value, Mapping):
        by_name = _keys(value)
        built = {name: rebuild(value[key], leaves) for name, key in by_name.items()}
        names = {key: name for name, key in by_name.items()}
        return _like_mapping(value, {key: built[names[key]] for key in value})
    children = [rebuild(child, leaves) for child in value]
    if _is_namedtuple(value):
        return type(value)(*children)
    return tuple(children) if isinstance(value, tuple) else children


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, key in _keys(value).items():
            yield name, value[key]
    elif _is_namedtuple(value):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield str(index), child


def _keys(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The keys by name, in one order on all ranks; keys of different types cannot be compared."""
    return {repr(key): key for key in sorted(value, key=repr)}


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(value) is OrderedDict:
        return OrderedDict(items)
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, items)
    return items
