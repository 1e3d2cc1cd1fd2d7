"""The page: one HTML file with everything in it. What it shows is drawn by its own script; nothing is fetched."""

from importlib.resources import files
from pathlib import Path

from sparring.errors import UserError
from sparring.report.collection import Collection
from sparring.report.folder import RunFolder, runs_in
from sparring.report.media import data_uri

SCRIPTS = ("draw.js", "charts.js", "sections.js", "page.js")
# a page that may talk to its own server, and one that may talk to nobody
_MAY_FETCH = {
    True: "img-src 'self' data:; media-src 'self'; connect-src 'self'",
    False: "img-src data:; media-src blob:",
}


def write_report(paths: list[Path], output: Path, budget: int) -> Collection:
    """The report of these runs, with at most so many bytes of pictures."""
    found = {path: runs_in(path) for path in paths}
    runs = [run for below in found.values() for run in below]
    lacking = [path for path, below in found.items() if not below]
    if lacking:
        listed = ", ".join(f"'{path}'" for path in lacking)
        raise UserError(f"{listed}: no run there; give run folders, e.g. outputs/finetune_rl")
    have_pictures = [run for run in runs if any((run / name).exists() for name in ("videos", "samples"))]
    share = budget // max(1, len(have_pictures))
    collection = Collection(runs, lambda path: RunFolder(path, lambda run, seen: data_uri(run / seen.file), share))
    collection.refresh()
    try:
        output.write_bytes(page(collection.changes(), live=False))
    except OSError as error:
        raise UserError(
            f"'{output}': cannot write there ({error.strerror}); give --output FILE in a folder that is there and yours"
        ) from None
    return collection


def page(content: bytes, live: bool) -> bytes:
    """The page with this content; a live one asks for more."""
    assets = files("sparring.report") / "assets"
    texts = {
        "POLICY": _MAY_FETCH[live].encode(),
        "STYLE": (assets / "style.css").read_bytes(),
        "SCRIPT": b"".join((assets / name).read_bytes() for name in SCRIPTS),
        "LIVE": b"live" if live else b"",
        # so that no text of a run can end the script element
        "CONTENT": content.replace(b"<", b"\\u003c"),
    }
    shell = (assets / "page.html").read_bytes()
    for name, text in texts.items():
        shell = shell.replace(b"{{%s}}" % name.encode(), text, 1)
    return shell
