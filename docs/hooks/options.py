"""Lets the reference show each field of `PPOConfig` with its default and its `help` text."""

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Reads `name: type = _option(default, "help")` as a documented attribute with that default."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Take the default and the help text out of the call; called by griffe for each attribute."""
        call = attr.value
        if isinstance(call, griffe.ExprCall) and str(call.function) == "_option":
            default, help_text = call.arguments[:2]
            text = ast.literal_eval("(" + " ".join(str(help_text).splitlines()) + ")")
            attr.value = default
            attr.docstring = griffe.Docstring(text, parent=attr)
