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
    """Columns by nested key; what a transition has beyond them is left out."""

    def __init__(self, columns: Mapping[tuple[str, ...], RowOf]):
        self._keys = set(columns)
        self._tree: dict = {}
        for (*branch, leaf), row_of in columns.items():
            node = self._tree
            for name in branch:
                node = node.setdefault(name, {})
            node[leaf] = row_of

    def write(self, row: int, td: TensorDict) -> None:
        if _write(self._tree, row, td) < len(self._keys):
            missing = sorted("/".join(key) for key in self._keys - {key for key, _ in leaves(td)})
            raise KeyError(f"the transition lacks {', '.join(missing)}, which earlier ones had")


def leaves(td: TensorDict) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    items = td.items(include_nested=True, leaves_only=True)
    return [(key if isinstance(key, tuple) else (key,), value) for key, value in items]


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
            node(row).copy_(value)
            written += 1
    return written
