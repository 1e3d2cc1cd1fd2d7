"""The report page: one HTML file with everything in it. Its own script draws it; it fetches nothing."""

import base64
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import orjson

from sparring import __version__
from sparring.errors import UserError
from sparring.record.names import meanings
from sparring.report.media import TYPES, Picture
from sparring.report.run_folder import RunFolder

SCRIPTS = ("draw.js", "charts.js", "sections.js", "page.js")
# content policy of a live page, which may talk to its own server, and of one that may talk to nobody
_MAY_FETCH = {
    True: "img-src 'self' data:; media-src 'self'; connect-src 'self'",
    False: "img-src data:; media-src blob:",
}


class Collection:
    """The runs in and below some folders. `changes(since)` is all that is new after that version."""

    def __init__(self, paths: list[Path], make: Callable[[Path], RunFolder]):
        self.paths, self.make = paths, make
        self.version = 0
        self.runs: dict[Path, RunFolder] = {}
        self.numbers: dict[Path, int] = {}  # runs keep their number when others come or go
        self._together: dict | None = None
        self._together_changed = 0

    def refresh(self) -> None:
        self.version += 1
        # a folder that does not exist yet is waited for
        found = [run for path in self.paths for run in (RunFolder.all_in(path) or [path])]
        self.runs = {path: self.runs.get(path) or self.make(path) for path in dict.fromkeys(found)}
        for path, run in self.runs.items():
            self.numbers.setdefault(path, len(self.numbers))
            run.refresh(self.version)
        together = {"order": [str(self.numbers[path]) for path in self.runs], "sparring": __version__}
        together |= RunFolder.side_by_side(list(self.runs.values())) | {"meanings": meanings()}
        if together != self._together:
            self._together, self._together_changed = together, self.version

    def changes(self, since: int = 0) -> bytes:
        """JSON of `runs` (number -> changed part -> content) and `together` (order, labels, settings)."""
        if since > self.version:  # from a page that another process served
            since = 0
        changed = {
            str(self.numbers[path]): {name: run.parts[name] for name, at in run.changed.items() if at > since}
            for path, run in self.runs.items()
        }
        content = {"version": self.version, "made": time.time(), "runs": {k: v for k, v in changed.items() if v}}
        if self._together_changed > since:
            content["together"] = self._together
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def page(self, live: bool) -> bytes:
        assets = files("sparring.report") / "assets"
        texts = {
            "POLICY": _MAY_FETCH[live].encode(),
            "STYLE": (assets / "style.css").read_bytes(),
            "SCRIPT": b"".join((assets / name).read_bytes() for name in SCRIPTS),
            "LIVE": b"live" if live else b"",
            # so that no text of a run can end the script element
            "CONTENT": self.changes().replace(b"<", b"\\u003c"),
        }
        html = (assets / "page.html").read_bytes()
        for name, text in texts.items():
            html = html.replace(b"{{%s}}" % name.encode(), text, 1)
        return html

    @classmethod
    def write(cls, paths: list[Path], output: Path, budget: int) -> "Collection":
        found = {path: RunFolder.all_in(path) for path in paths}
        runs = [run for below in found.values() for run in below]
        lacking = [path for path, below in found.items() if not below]
        if lacking:
            listed = ", ".join(f"'{path}'" for path in lacking)
            raise UserError(f"{listed}: no run there; give run folders, e.g. outputs/finetune_rl")
        have_pictures = [run for run in runs if any((run / name).exists() for name in ("videos", "samples"))]
        share = budget // max(1, len(have_pictures))

        def data_uri(run: Path, picture: Picture) -> str:
            content = (run / picture.file).read_bytes()
            return f"data:{TYPES[Path(picture.file).suffix]};base64,{base64.b64encode(content).decode()}"

        collection = Collection(runs, lambda path: RunFolder(path, data_uri, share))
        collection.refresh()
        try:
            output.write_bytes(collection.page(live=False))
        except OSError as error:
            raise UserError(
                f"'{output}': cannot write there ({error.strerror}); give --output FILE in a "
                "folder that is there and yours"
            ) from None
        return collection
