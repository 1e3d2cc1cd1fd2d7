"""Imports the class or function that a config names: "ppo" or "my.module:Class"."""

import difflib
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from sparring.config import IMPORTED_FROM
from sparring.config.section import Section
from sparring.errors import UserError, describe_error


def resolve(name: str, known: dict[str, str], kind: str) -> Any:
    if name not in known and known and ":" not in name:
        choices = f"known: {', '.join(known)}, or your.module:Class"
        raise UserError(f"unknown {kind} '{name}'{_nearest(name, known)}; {choices}")
    path = known.get(name, name)
    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise UserError(f"{kind} '{path}' is not an import path; expected your.module:Class")
    module = import_module(module_name, f"{kind} '{path}'")
    if not hasattr(module, attribute):
        near = _nearest(attribute, dir(module))
        raise UserError(f"{kind} '{path}': module '{module_name}' has no '{attribute}'{near}")
    found = getattr(module, attribute)
    # a config may call classes and Python functions only, not e.g. os:system
    if path not in known.values() and not (isinstance(found, type) or inspect.isfunction(found)):
        expected = "expected a class, or a function written in Python"
        raise UserError(f"{kind} '{path}' is a {type(found).__name__}; {expected}")
    return found


def build(section: Any, known: dict[str, str], *runtime: Any, kind: str, name: str | None = None) -> Any:
    """`Class(section, *runtime)`; `name` (default: `section.name`) selects the class from `known`. Example:
    `build(config.policy, POLICIES, env.spec, chunk, kind="policy")`."""
    return resolve(name or section.name, known, kind)(section, *runtime)


def import_module(name: str, owner: str, advice: str = "") -> ModuleType:
    """Import a module. For errors: what needs it (`owner`), and another fix if it is missing (`advice`)."""
    here = [] if f"{name}.".startswith("sparring.") else [place for place in IMPORTED_FROM if not _holds_results(place)]
    # appended, so that it cannot hide installed modules; kept, because the module may import more later
    sys.path += [place for place in here if place not in sys.path]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        hint = f"'{name}' itself needs '{error.name}', which is not installed"
        if f"{name}.".startswith(f"{error.name}."):
            more = f" Otherwise: {advice}" if advice else _nearest_module(str(error.name))
            # modules are not imported from a folder of results, which may be another user's
            where = "on PYTHONPATH? (Modules in a run folder are not imported.)"
            hint = f"is it {'in this folder or on PYTHONPATH?' if here or not IMPORTED_FROM else where}{more}"
        raise UserError(f"{owner}: no module '{error.name}'; {hint}") from None
    except Exception as error:
        raise UserError(f"{owner}: importing '{name}' failed: {describe_error(error)}") from error


def config_class(cls: Any, kind: str) -> type[Section]:
    """The config class of a class: the annotation of its first parameter."""
    if not isinstance(cls, type):
        raise UserError(f"{kind} {cls!r} is not a class; expected your.module:Class")
    where = f"{kind} '{cls.__module__}:{cls.__name__}'"
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except NameError as error:
        why = f"an annotation of __init__ cannot be resolved ({error}); import it at run time"
        raise UserError(f"{where}: {why}") from None
    section = hints.get(parameters[0]) if parameters else None
    if section is None:
        example = "e.g. def __init__(self, config: MyConfig, ...)"
        raise UserError(f"{where}: its first parameter must be annotated with its config class, {example}")
    if not (isinstance(section, type) and issubclass(section, Section)):
        example = "e.g. class MyConfig(Section)"
        raise UserError(f"{where}: its config {section} must be a sparring.config.Section, {example}")
    return section


def _holds_results(folder: str) -> bool:
    """Whether this is a run, a checkpoint or a dataset."""
    patterns = ("manifest.json", "status.json", "spec.json", "meta/info.json", "checkpoint-*")
    return any(True for pattern in patterns for _ in Path(folder).glob(pattern))


def _nearest_module(name: str) -> str:
    package, _, last = name.rpartition(".")
    places = getattr(sys.modules[package], "__path__", []) if package else None
    near = difflib.get_close_matches(last, [module.name for module in pkgutil.iter_modules(places)], n=1)
    return f" (nearest: {name.removesuffix(last)}{near[0]})" if near else ""


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; nearest: {close[0]}" if close else ""
