"""From a name in a config to the thing itself: "ppo" or "my.module:Class"."""

import difflib
import importlib
import inspect
import typing
from typing import Any

from sparring.errors import UserError


def resolve(name: str, known: dict[str, str], kind: str) -> Any:
    """The object that `name` means: a short name in `known`, or an import path."""
    return import_path(path_of(name, known, kind), kind)


def path_of(name: str, known: dict[str, str], kind: str) -> str:
    """The import path behind a name; nothing is imported yet."""
    if name in known:
        return known[name]
    if ":" in name:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"nearest: {close[0]}; " if close else ""
    raise UserError(f"no {kind} is called '{name}'; {hint}known: {', '.join(known)}, or your.module:Class")


def import_path(path: str, kind: str) -> Any:
    """'package.module:Thing' -> Thing."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        hint = (
            "is it on PYTHONPATH?"
            if module_name.startswith(missing)
            else f"'{module_name}' itself needs '{missing}', which is not installed"
        )
        raise UserError(f"{kind} '{path}': no module '{missing}'; {hint}") from None
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; nearest: {close[0]}" if close else ""
        raise UserError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{hint}")
    return getattr(module, attribute)


def config_class(cls: type, kind: str) -> type:
    """The config a class reads: the annotation of its first parameter."""
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]
    hints = typing.get_type_hints(cls.__init__)
    if not parameters or parameters[0] not in hints:
        raise UserError(
            f"{kind} '{cls.__module__}:{cls.__name__}': its first parameter must be annotated with its config class, "
            "e.g. def __init__(self, config: MyConfig, ...)"
        )
    return hints[parameters[0]]
