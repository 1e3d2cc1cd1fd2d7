"""What is written must be there after a power cut."""

import os
from pathlib import Path


def flush_tree(folder: Path) -> None:
    """A folder and all files and folders in it onto the disk."""
    for path in (*folder.rglob("*"), folder):
        flush(path)


def flush(path: Path) -> None:
    """A file or folder onto the disk, so that a rename never points at an empty file after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
