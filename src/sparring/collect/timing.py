"""Which stage of collecting or learning was at work when, and for how long."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# spans that are kept until somebody asks for them: a few rollouts
_KEPT = 8192


@dataclass(frozen=True)
class Span:
    """One turn of a stage, in seconds since the epoch. `who`: learner, collector, or collector 0, 1, ... of groups."""

    who: str
    stage: str
    begin: float
    end: float
    # of the weights that acted, or that an update started from
    version: int


class Stopwatch:
    """Times stages, one thread at a time. Whoever watches is called with each stage that is entered, and left."""

    def __init__(
        self, who: str, entered: Callable[[str], None] | None = None, left: Callable[[str], None] | None = None
    ):
        self.who, self._entered, self._left = who, entered, left
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        # where it was when an exception came through
        self.failed: str | None = None

    @contextmanager
    def stage(self, stage: str, version: int) -> Iterator[None]:
        began = time.time()
        if self._entered:
            self._entered(stage)
        try:
            yield
        except BaseException:
            self.failed = self.failed or stage
            raise
        if self._left:
            self._left(stage)
        ended = time.time()
        self.seconds[stage] += ended - began
        self.spans.append(Span(self.who, stage, began, ended, version))

    def drain(self) -> tuple[dict[str, float], list[Span]]:
        """Seconds of each stage, and its turns, since the last call."""
        drained = dict(self.seconds), list(self.spans)
        self.seconds.clear()
        self.spans.clear()
        return drained
