"""Signs of life: what the processes of `--gpus N` tell their launcher, in a small file that all of them map. No torch.

Each process has a row of whole numbers and is the only one to write it: how often its heart has beaten (a thread of its
own, so a process that computes for minutes still lives), how many collectives it has entered and where it is now, and
how many updates are through. The launcher measures how long these stay the same, by its own clock.
"""

import atexit
import contextlib
import mmap
import os
import threading
import time
import zlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# names the file, in the environment of the processes
FILE = "SPARRING_SIGNS"
BEAT_S = 0.2
BEATS, ENTERED, PLACE, UPDATES, COLUMNS = range(5)
# where a process is: in no collective; in one that all must reach soon; in one where some may come minutes later
ELSEWHERE, TOGETHER, PATIENT = range(3)
# how much longer everything may take before the first update is through, when things are read and compiled, and when a
# process leaves, whose heart no longer beats while its libraries are put away
FIRST_TIME = 10
# seconds until a process must have begun: libraries are read from slow disks
BEGIN_S = 600.0


class Signs:
    """`numbers [processes * COLUMNS]` of an open file."""

    def __init__(self, file: Path):
        with open(file, "r+b") as opened:
            self.numbers = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")

    @classmethod
    def make(cls, file: Path, processes: int) -> "Signs":
        file.write_bytes(bytes(8 * COLUMNS * processes))
        return cls(file)

    def row(self, rank: int) -> memoryview:
        return self.numbers[rank * COLUMNS : (rank + 1) * COLUMNS]


@cache
def own_row() -> memoryview | None:
    """Of this process, whose heart begins to beat with the first call; None where nobody launched it."""
    if FILE not in os.environ:
        return None
    row = Signs(Path(os.environ[FILE])).row(int(os.environ["RANK"]))
    threading.Thread(target=_beat, args=(row,), daemon=True).start()
    atexit.register(row.__setitem__, UPDATES, 0)
    return row


def is_first_to_say(sentence: str) -> bool:
    """Of the processes that were launched together: what all of them would say is said once."""
    if FILE not in os.environ:
        return True
    said = Path(os.environ[FILE]).with_name(f"said-{zlib.crc32(sentence.encode()):08x}")
    # a launcher that has gone has taken the folder along
    with contextlib.suppress(FileNotFoundError):
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def _beat(row: memoryview) -> None:
    while True:
        row[BEATS] += 1
        time.sleep(BEAT_S)


@dataclass
class Watched:
    """One process, as the launcher sees it: for how many seconds it has shown the same."""

    row: memoryview
    seen: list[int] = field(default_factory=lambda: [0] * COLUMNS)
    silent: float = 0.0
    still: float = 0.0

    def look(self, seconds: float) -> None:
        now = self.row.tolist()
        self.silent = self.silent + seconds if now[BEATS] == self.seen[BEATS] else 0.0
        moved = now[ENTERED : PLACE + 1] != self.seen[ENTERED : PLACE + 1]
        self.still = 0.0 if moved else self.still + seconds
        self.seen = now

    @property
    def begun(self) -> bool:
        return self.seen[BEATS] > 0

    @property
    def place(self) -> int:
        return self.seen[PLACE]

    @property
    def updates(self) -> int:
        return self.seen[UPDATES]


class Watchdog:
    """Finds who hangs. It is asked often, and told how many seconds went by."""

    def __init__(self, signs: Signs, processes: int, watchdog_s: float):
        self.watchdog_s = watchdog_s
        self.watched = [Watched(signs.row(rank)) for rank in range(processes)]

    def look(self, alive: list[int], seconds: float) -> tuple[list[int], str] | None:
        """The ranks that hang, and why one thinks so."""
        for rank in alive:
            self.watched[rank].look(seconds)
        seen = {rank: self.watched[rank] for rank in alive}
        first = 1 if all(one.updates for one in seen.values()) else FIRST_TIME
        patience = self.watchdog_s * first
        silent = [rank for rank, one in seen.items() if one.silent > (patience if one.begun else BEGIN_S)]
        if silent:
            return silent, "gave no sign of life"
        if not any(one.place == TOGETHER and one.still > patience for one in seen.values()):
            return None
        missing = [rank for rank, one in seen.items() if one.place == ELSEWHERE]
        if missing:
            return missing, "did not come to where the others wait for it"
        if all(one.still > patience for one in seen.values()):
            return list(seen), "wait for each other"
        return None
