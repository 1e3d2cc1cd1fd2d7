"""Writing one transition into the rows of a store, leaf by leaf.

Looking up nested keys of a TensorDict costs more than copying a small leaf, so a transition is walked through once, in
step with a tree of the columns.
"""

from collections.abc import Callable, Mapping

import torch
from tensordict import TensorDict

# row number -> that row of a column
RowOf = Callable[[int], torch.Tensor]


class RowWriter:
    """Columns by nested key; what a transition has beyond them is left out, and nothing is cast or repeated to fit."""

    def __init__(self, columns: Mapping[tuple[str, ...], RowOf]):
        self._keys = set(columns)
        self._tree: dict = {}
        for (*branch, leaf), row_of in columns.items():
            node = self._tree
            for name in branch:
                node = node.setdefault(name, {})
            row = row_of(0)
            node[leaf] = row_of, row.dtype, row.nbytes, (*branch, leaf)

    def write(self, row: int, td: TensorDict) -> None:
        if _write(self._tree, row, td) < len(self._keys):
            missing = sorted("/".join(key) for key in self._keys - {key for key, _ in leaves(td)})
            raise KeyError(f"the transition lacks {', '.join(missing)}, which earlier ones had")


def leaves(td: TensorDict) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    items = td.items(include_nested=True, leaves_only=True)
    return [(key if isinstance(key, tuple) else (key,), value) for key, value in items]


def check_fits(key: tuple[str, ...], value: torch.Tensor, row: torch.Tensor) -> None:
    if value.shape != row.shape or value.dtype != row.dtype:
        raise ValueError(
            f"{'/'.join(key)} is {value.dtype} {list(value.shape)}, but in the first transition it was "
            f"{row.dtype} {list(row.shape)}; all of one buffer must be alike"
        )


def check_continues(
    row: Mapping[tuple[str, ...], torch.Tensor], observation: TensorDict, goes_on: torch.Tensor
) -> None:
    """`observation` [N] is what was stored in `row` [N] as the one after the last transition, where `goes_on` [N]."""
    for key, stored in row.items():
        given = observation.get(key).to(stored.device)[goes_on]
        if torch.equal(stored[goes_on], given):
            continue
        name = "/".join(("observation", *key))
        if given.isnan().any():
            raise RuntimeError(f"{name} holds NaN, which equals nothing; mend the env, or what it is normalised with")
        raise RuntimeError(
            f"{name} is not what the last transition led to; clear() the buffer before adding what starts elsewhere"
        )


def _write(tree: dict, row: int, td: TensorDict) -> int:
    """How many columns were written."""
    written = 0
    for name, value in td.items():
        node = tree.get(name)
        if node is None:
            continue
        if type(node) is dict:
            written += _write(node, row, value)
        else:
            row_of, dtype, nbytes, key = node
            # of one type and size nothing can be cast or repeated; looking at the shape would take twice as long
            if value.dtype is not dtype or value.nbytes != nbytes:
                check_fits(key, value, row_of(row))
            row_of(row).copy_(value)
            written += 1
    return written
