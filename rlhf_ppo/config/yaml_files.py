"""YAML as people mean it: a key stands once, and `no` is a word, such as the value of `save_strategy`."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

_BOOL = "tag:yaml.org,2002:bool"


class UniqueKeys(yaml.SafeLoader):
    """Reads YAML in which a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that stands twice."""
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise ValueError(f"the key {', '.join(twice)} stands twice")
        return super().construct_mapping(node, deep)


class PlainWords(UniqueKeys):
    """Reads only `true` and `false` as such, as YAML 1.2 does; `yes`, `no`, `on` and `off` are words."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
        for first, resolvers in UniqueKeys.yaml_implicit_resolvers.items()
    }


PlainWords.add_implicit_resolver(_BOOL, re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))
