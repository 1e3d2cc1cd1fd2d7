"""Parts of a network by patterns of their names."""

import difflib
import fnmatch
import re
from collections.abc import Iterable

from torch import nn

from sparring.errors import UserError


def matching(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """Those of `names` that a pattern means, in their order; every pattern must mean one, or the user is told.

    A pattern is a name or the end of one (from a dot on), where * and ? stand for anything, or a regex of the whole
    name; what is inside of a part that it means is meant too. `key`: the setting they come from.
    """
    names = list(names)
    # a part has a name that is the beginning of others'
    parts = list(dict.fromkeys(part for name in names for part in _path(name)))
    meant: set[str] = set()
    for pattern in patterns:
        found = {part for part in parts if means(pattern, part)}
        if not found:
            raise UserError(f"{key}: '{pattern}' matches no part of the model{_nearest(pattern, parts)}")
        meant |= found
    return [name for name in names if not meant.isdisjoint(_path(name))]


def weights_meant(model: nn.Module, patterns: Iterable[str], key: str) -> list[nn.Parameter]:
    weights = dict(model.named_parameters())
    return [weights[name] for name in matching(weights, patterns, key)]


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """The weights that the patterns of policy.frozen mean stay as they are."""
    for weight in weights_meant(model, patterns, "policy.frozen"):
        weight.requires_grad_(False)


def _path(name: str) -> list[str]:
    """'a.b.c' -> 'a', 'a.b', 'a.b.c'."""
    steps = name.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps) + 1)]


def means(pattern: str, name: str) -> bool:
    """Whether `name` itself is meant, not only something around it."""
    # with a dot before both, a glob that means a name or the end of one from a dot on
    if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}") or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # a glob such as *.q_proj is no regex
        return False


def _nearest(pattern: str, parts: list[str]) -> str:
    # by whole names and by their ends: q_prj is near to q_proj
    ends = {part.rpartition(".")[2]: part for part in parts} | {part: part for part in parts}
    close = difflib.get_close_matches(pattern, ends, n=1) or difflib.get_close_matches(
        pattern.split(".")[-1], ends, n=1
    )
    return f"; nearest: {close[0]}" if close else f"; it has {', '.join(p for p in parts if '.' not in p)}"
