"""Parameters of functions in the source files of simulators that cannot be imported here, and of their doubles."""

import ast
from pathlib import Path


def parameters(file: Path, name: str) -> list[str]:
    """Of a function `f` or of a method `Class.f`; `*` and `**` mark the last ones."""
    body = ast.parse(file.read_text()).body
    *classes, function = name.split(".")
    for owner in classes:
        (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
        body = found.body
    (defined,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    given = defined.args
    starred = [f"{stars}{each.arg}" for stars, each in (("*", given.vararg), ("**", given.kwarg)) if each]
    return [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]] + starred
