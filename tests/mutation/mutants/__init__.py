"""Mutants by room: for a file and its tests, the original text and its replacement."""

import importlib
import pkgutil

TABLES: dict[str, dict[tuple[str, str], list[tuple[str, str]]]] = {
    "." if module.name == "trainer" else module.name: importlib.import_module(f"{__name__}.{module.name}").MUTANTS
    for module in pkgutil.iter_modules(__path__)
}
