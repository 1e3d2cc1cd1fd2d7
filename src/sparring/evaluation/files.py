"""Files of an evaluation, and text tables."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from sparring.config.text import value_text
from sparring.errors import UserError

# ---- Tables for people.


def lined_up(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table whose first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


# ---- Where `sparring eval` puts what it found: beside the checkpoint, under a name that says what was evaluated.
#
# eval.json                videos/eval_0.mp4 ...                on the episodes that the run was trained for
# eval_task-reach_d1.json  videos/eval_task-reach_d1_0.mp4 ...  on others: called by the settings that make them so


# letters of a name; file systems allow some more
LONGEST = 120


@dataclass(frozen=True)
class EvaluationFiles:
    """Of one evaluation; those of an earlier one of the same name are replaced."""

    folder: Path
    name: str
    # of the numbers
    json_file: Path

    @classmethod
    def of(cls, folder: Path, kind: str, changed: dict[str, Any], json_file: Path | None) -> "EvaluationFiles":
        """`kind`: eval, eval_world_model, ...; `changed`: the settings that make other episodes than the run's own."""
        name = "_".join([kind, *(_plain(f"{key.rpartition('.')[2]} {value_text(changed[key])}") for key in changed)])
        if len(name) > LONGEST:
            name = f"{name[: LONGEST - 9]}-{crc32(name.encode()):08x}"
        return cls(folder, name, json_file or folder / f"{name}.json")

    def check_numbers(self) -> None:
        refuse_unwritable(self.json_file)

    def check_videos(self) -> None:
        refuse_unwritable(self.folder / f"{self.name}.mp4", "leave out --videos")

    def remove_videos(self) -> None:
        """Those of an earlier evaluation, of which there may have been more."""
        for folder, suffix in (("videos", "mp4"), ("samples", "png")):
            for file in (self.folder / folder).glob(f"{self.name}_*.{suffix}"):
                if file.stem.removeprefix(f"{self.name}_").isdecimal():
                    file.unlink()


def refuse_unwritable(file: Path, instead: str = "give --json FILE in a folder that is there and yours") -> None:
    """Told before hours are spent. It is tried: rights alone do not tell."""
    # a link to what is not there yet is somebody's
    was_there = os.path.lexists(file)
    try:
        file.open("a").close()
    except OSError as error:
        raise UserError(f"'{file}': cannot write there ({error.strerror}); {instead}") from None
    if not was_there:
        file.unlink()


def _plain(text: str) -> str:
    """Fit for the name of a file: "task [lift_d0]" -> "task-lift_d0"."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")
