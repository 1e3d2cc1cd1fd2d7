"""Several runs on one page: what each has to show, what they are called, what differs."""

import time
from collections.abc import Callable
from pathlib import Path

import orjson

from sparring import __version__
from sparring.record.names import meanings
from sparring.report.folder import RunFolder, runs_in
from sparring.report.settings import defaults, differences, labels, short_names


class Collection:
    """The runs in and below some folders. `changes(since)` is all that is new after that version."""

    def __init__(self, paths: list[Path], make: Callable[[Path], RunFolder]):
        self.paths = paths
        self.make = make
        self.version = 0
        self.runs: dict[Path, RunFolder] = {}
        # runs keep their number when others come or go
        self.numbers: dict[Path, int] = {}
        self._together: dict | None = None
        self._together_changed = 0

    def refresh(self) -> None:
        self.version += 1
        # a folder that is not there yet is waited for
        found = [run for path in self.paths for run in (runs_in(path) or [path])]
        self.runs = {path: self.runs.get(path) or self.make(path) for path in dict.fromkeys(found)}
        for path, run in self.runs.items():
            self.numbers.setdefault(path, len(self.numbers))
            run.refresh(self.version)
        together = self._side_by_side()
        if together != self._together:
            self._together, self._together_changed = together, self.version

    def changes(self, since: int = 0) -> bytes:
        """As JSON: `runs`: number -> part -> content, of parts that changed; `order`, labels and settings."""
        if since > self.version:  # of a page that another process served
            since = 0
        changed = {
            str(self.numbers[path]): {name: run.parts[name] for name, at in run.changed.items() if at > since}
            for path, run in self.runs.items()
        }
        content = {"version": self.version, "made": time.time(), "runs": {k: v for k, v in changed.items() if v}}
        if self._together_changed > since:
            content["together"] = self._together
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def _side_by_side(self) -> dict:
        runs = list(self.runs.values())
        configs, names = [run.config for run in runs], short_names(list(self.runs))
        if len(runs) > 1:
            compared, columns = differences(configs), None
        else:
            usual = defaults(configs[0]) if configs[0] else None
            compared, columns = (differences([configs[0], usual]), ["this run", "default"]) if usual else ([], None)
        return {
            "order": [str(self.numbers[path]) for path in self.runs],
            "labels": labels(configs, names),
            "names": names,
            "settings": compared,
            # of one run, what its settings are compared with
            "columns": columns,
            "meanings": meanings(),
            "sparring": __version__,
        }
