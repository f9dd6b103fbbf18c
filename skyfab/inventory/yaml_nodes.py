"""Reads YAML as nodes: nothing is constructed, each node knows its line, and an alias is the node that it names.

PyYAML's own composer calls itself for each level: on deep nesting that of libyaml crashes, and that in Python is slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Final, Literal

from skyfab.errors import InventoryError

_DEEPEST: Final = 100
_STANDARD: Final = "tag:yaml.org,2002:"


@dataclass(slots=True, eq=False)
class Node:
    """A part of a document."""

    kind: Literal["null", "scalar", "merge", "sequence", "mapping"]
    line: int
    text: str = ""
    """Of a scalar."""
    tag: str = ""
    """One that is not of YAML itself, such as ``!vault``."""
    parts: list[Node] = field(default_factory=list)
    """Items of a sequence; keys and values of a mapping in turn."""


def compose(text: str, source: str) -> Node | None:
    """The only document of a text; None if that is empty. Raises InventoryError, also where there is no PyYAML."""
    yaml = _pyyaml(source)
    root: Node | None = None
    anchors: dict[str, Node] = {}
    inside: list[Node] = []
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            line = event.start_mark.line + 1
            if isinstance(event, yaml.CollectionEndEvent):
                inside.pop()
            elif isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise InventoryError(f"{source}:{line}: is not YAML: has a second document", hint="split the file")
            if not isinstance(event, yaml.NodeEvent):
                continue
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    raise InventoryError(f"{source}:{line}: is not YAML: there is no &{event.anchor}", hint="add one")
                node = anchors[event.anchor]
            else:
                node = _node(yaml, event, line)
                if event.anchor:
                    anchors[event.anchor] = node
            if inside:
                inside[-1].parts.append(node)
            else:
                root = node
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append(node)
                if len(inside) > _DEEPEST:
                    raise InventoryError(f"{source}:{line}: is nested too deeply", hint="groups can be named once each")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = source if mark is None else f"{source}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        hint = "hosts are keys: all, below it hosts, below it node1 and a colon"
        raise InventoryError(f"{place}: is not YAML: {problem}", hint=hint) from None
    return root


def _node(yaml: ModuleType, event: object, line: int) -> Node:
    written = getattr(event, "tag", None) or ""
    tag = "" if written == "!" or written.startswith(_STANDARD) else written
    if isinstance(event, yaml.MappingStartEvent):
        return Node("mapping", line, tag=tag)
    if isinstance(event, yaml.SequenceStartEvent):
        return Node("sequence", line, tag=tag)
    text = event.value  # type: ignore[attr-defined]
    if not written and event.implicit[0]:  # type: ignore[attr-defined] # neither quoted nor tagged
        if text in ("", "~", "null", "Null", "NULL"):
            return Node("null", line)
        if text == "<<":
            return Node("merge", line)
    return Node("scalar", line, text, tag)


def _pyyaml(source: str) -> ModuleType:
    try:
        import yaml
    except ImportError:
        raise InventoryError(
            f"{source}: is YAML, and PyYAML is not installed", hint="pip install 'skyfab[ansible]'"
        ) from None
    return yaml  # type: ignore[no-any-return]
