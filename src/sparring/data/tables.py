"""Reads the tables and JSON files of a dataset. Any content may be wrong, and raises a DatasetError. Torch-free."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data.dataset import DatasetError
from sparring.errors import UserError


def parquet():
    """Import pyarrow.parquet, an optional dependency."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError('datasets need pyarrow, which is not installed: pip install "sparring[demos]"') from None
    return pyarrow.parquet


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    return _objects(path, lambda text: [text])[0] if path.exists() or not optional else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    # not splitlines(), which also splits at U+2028, and JSON text may contain that
    return _objects(path, lambda text: [line for line in text.split("\n") if line.strip()])


def _objects(path: Path, split: Callable[[str], list[str]]) -> list[dict[str, Any]]:
    try:
        # reading a pipe would block
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")
        contents = list(map(json.loads, split(path.read_text(encoding="utf-8"))))
        for content in contents:
            if not isinstance(content, dict):
                raise ValueError(f"it contains a {type(content).__name__}, expected keys with values")
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"'{path}' cannot be read ({error}); copy the dataset again") from None
    return contents


def read_table(path: Path, columns: list[str] | None, episode: int | None = None):
    """A Parquet file. `columns`: None for all; `episode`: only its rows."""
    reader = parquet()
    from pyarrow.lib import ArrowException

    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        # opened as a single file, so that names of folders do not become columns
        with reader.ParquetFile(path) as file:
            missing = [name for name in columns or () if name not in file.schema_arrow.names]
            if missing:
                names = ", ".join(file.schema_arrow.names)
                raise DatasetError(f"'{path}' has no column {', '.join(missing)}; found {names}")
            if episode is None:
                return file.read(columns)
        rows = [("episode_index", "==", episode)]
        return reader.read_table(path, columns=columns, filters=rows, partitioning=None)
    except (OSError, ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DatasetError(f"'{path}' cannot be read ({reason}); it is missing or incomplete: copy it again") from None


def read_sorted(
    files: list[Path], shapes: dict[str, list[int] | None], by: str
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The concatenated columns of all files, sorted by one of them: numbers, and texts (those without a shape)."""
    parts = [read_table(file, list(shapes)) for file in files]
    numbers = {
        name: np.concatenate([_rows(part[name], shape, file) for part, file in zip(parts, files, strict=True)])
        for name, shape in shapes.items()
        if shape is not None
    }
    order = np.argsort(numbers[by], kind="stable")
    texts = {}
    for name in (name for name, shape in shapes.items() if shape is None):
        rows = [str(entry or "") for part in parts for entry in part[name].to_pylist()]
        texts[name] = [rows[row] for row in order]
    return {name: values[order] for name, values in numbers.items()}, texts


def _rows(column, shape: list[int], path: Path) -> np.ndarray:
    """`[F]` if an entry is a single number, otherwise `[F, *shape]`."""
    from pyarrow.compute import list_value_length

    entries = flat = column.combine_chunks()
    is_list = str(entries.type).startswith(("list", "fixed_size_list", "large_list"))
    # check each row at each level: a short and a long row could cancel out in the total, with all between them shifted
    for size in shape if is_list else ():
        lengths = list_value_length(flat).to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            row = int(np.argmax(lengths != size))
            raise DatasetError(f"'{path}': row {row} of {len(flat)} has {lengths[row]} numbers, expected {size} each")
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype == object:
        raise DatasetError(f"'{path}' has a column of type {column.type}, expected numbers")
    return values.reshape(len(entries), *shape) if is_list else values
