"""Result files of evaluations (eval.json, eval_<changed settings>.json, videos/<same name>_0.mp4) and text tables."""

import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zlib import crc32

from sparring.config.text import value_text
from sparring.errors import UserError, visible
from sparring.processes.files import refuse_special, write_whole
from sparring.processes.rows import Document

LONGEST = 120  # maximum length of a file name in characters; file systems allow some more
_NARROWEST = 6  # minimum width of a shortened column in characters


def terminal_width() -> int | None:
    """The width of the terminal in characters; None: stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Iterable[tuple[str, ...]], rule: bool = True, width: int | None = None, spare: tuple[int, ...] = ()
) -> str:
    """Format left-aligned columns; the first row is the head, with a `rule` below it.

    If the table is wider than `width`, `spare` columns are shortened first, in this order, then the widest."""
    rows = [tuple(visible(cell, kept="") for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widest_first = sorted(range(len(widths)), key=lambda i: -widths[i])
    for i in (*spare, *widest_first) if width else ():
        excess = sum(widths) + 2 * (len(widths) - 1) - cast(int, width)
        widths[i] -= max(0, min(excess, widths[i] - _NARROWEST))
    rows = [tuple(c if len(c) <= w else f"{c[: w - 1]}…" for c, w in zip(row, widths, strict=True)) for row in rows]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], *(["-" * len(lines[0])] if rule else []), *lines[1:]])


@dataclass
class EvaluationResult(ABC):
    episodes: int
    seed: int

    @abstractmethod
    def table(self, width: int | None = None) -> str:
        """The results as text; `width`: maximum line length in characters."""

    @abstractmethod
    def numbers(self) -> dict[str, float | None]:
        """Metrics for a row of evaluations.jsonl."""

    @abstractmethod
    def content(self) -> dict:
        """All measurements, for JSON."""

    def write(self, path: Path, about: dict | None = None) -> Path:
        content = {"episodes": self.episodes, "seed": self.seed, "split": "eval"} | (about or {}) | self.content()
        Document(path).write(content)
        return path


@dataclass(frozen=True)
class EvaluationFiles:
    folder: Path
    name: str
    json_file: Path

    @classmethod
    def of(cls, folder: Path, kind: str, changed: dict[str, Any], json_file: Path | None) -> "EvaluationFiles":
        """`kind`: eval, eval_world_model, ...; `changed`: settings by which episodes differ from those of the run."""
        settings = [f"{key.rpartition('.')[2]} {value_text(value)}" for key, value in changed.items()]
        # "task [lift_d0]" -> "task-lift_d0"
        name = "_".join([kind, *(re.sub(r"[^\w.-]+", "-", setting).strip("-") for setting in settings)])
        if len(name) > LONGEST:
            name = f"{name[: LONGEST - 9]}-{crc32(name.encode()):08x}"
        return cls(folder, name, json_file or folder / f"{name}.json")

    def remove_videos(self) -> None:
        """Remove the videos of an earlier evaluation, which may be more than this one writes."""
        for folder, suffix in (("videos", "mp4"), ("samples", "png")):
            for file in (self.folder / folder).glob(f"{self.name}_*.{suffix}"):
                if file.stem.removeprefix(f"{self.name}_").isdecimal():
                    file.unlink()


def refuse_unwritable(file: Path, instead: str = "give --json FILE in a folder that exists and is writable") -> None:
    """Raise UserError before a long evaluation if `file` cannot be written. It writes a test file, because permission
    bits are not enough to decide."""
    try:
        refuse_special(file)
        if file.exists():
            file.open("a").close()
        probe = file.with_name(f".{file.name}.probe")
        write_whole(probe, "")
        probe.unlink()
    except OSError as error:
        raise UserError(f"'{file}': cannot write there ({error.strerror}); {instead}") from None
