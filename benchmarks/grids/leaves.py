"""Settings of a configuration by their dotted keys, to compare two of them or to list them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested configuration."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from leaves(child, f"{key}.{name}".strip("."))
    else:
        yield key, node
