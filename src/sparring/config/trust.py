"""Trust in configs that name code. The settings of a folder (a run, a checkpoint, a dataset) may be anyone's: import
paths in them are imported only if this user signed its manifest, or with --trust, which signs it (docs/security.md).

Settings from the command line, Python and the file of --config are the user's own and are not checked. Reading a config
to compare or to show it imports nothing.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from sparring.config.text import Setting, read_settings, value_text
from sparring.errors import UserError, visible
from sparring.processes.manifest import MANIFEST, damage, is_signed, read_manifest, sign

_GIVEN = ContextVar("trust", default=False)
# prefixes of env.name that name an adapter of ours, as in envs.SIMS
SIMULATORS = ("metaworld", "robosuite", "mimicgen", "aloha", "maniskill", "libero", "robotwin")
# module:anything, as gymnasium imports the module whatever follows. Python names may contain more than \w, e.g. U+2118
_IMPORT_PATH = re.compile(r"\s*(?!\d)(?:[\w.-]|[^\x00-\x7f])+:\s*\S.*", re.DOTALL)
_HARMLESS = re.compile(r"(cpu|cuda|mps|xpu|meta):\d+|https?://.*", re.DOTALL)
# file that names code -> other files that --trust signs in its folder; all other files of a run may still change
_REST = {"config.yaml": ("spec.json", "training_state.pt", "model*")}
_REST["meta/sparring.json"] = ("meta/**/*", "data/**/*", "videos/**/*")


class TrustError(UserError):
    """A folder that this user neither wrote nor trusts names code to import."""


@contextmanager
def trusting(given: bool = True) -> Iterator[None]:
    """Context of --trust: folders that are read in it are trusted and signed."""
    token = _GIVEN.set(given or _GIVEN.get())
    try:
        yield
    finally:
        _GIVEN.reset(token)


def trusted_settings(folder: Path, keys: tuple[str, ...] = ("",)) -> list[Setting]:
    """The settings of the config.yaml in a run folder or checkpoint whose keys begin with one of `keys`."""
    settings = [setting for setting in read_settings(folder / "config.yaml") if setting.key.startswith(keys)]
    refuse_code(folder, "config.yaml", settings)
    return settings


def refuse_code(folder: Path | None, name: str, settings: Iterable[Setting]) -> None:
    """Raise TrustError if `settings`, read from the file `name` of `folder`, name code and the folder is not trusted.
    Call it before any of them is used. `folder=None`: a file outside of such folders, which cannot be signed."""
    found = _code_in(settings := [*settings])
    if not found or folder is not None and _is_own(folder, name, settings[0].sha256):
        return
    file = name if folder is None else str(folder / name)
    if not _GIVEN.get():
        why = f"names code to import, and you did not sign it, or it was changed since: {', '.join(found)}"
        advice = "check the named code, then pass --trust (in Python trust=True) to import it from now on"
        raise TrustError(f"'{file}' {why}. Nothing was imported; {advice}")
    if folder is not None and name == "config.yaml":  # the whole file is signed, also settings that are not used now
        found = _code_in(read_settings(folder / name))
    signed = folder is not None and _sign(folder, name, settings[0].sha256)
    if "RANK" not in os.environ:
        how = f"signed '{folder}'" if signed else "for this command only"
        _print_once(visible(f"trusted {file}, which imports {', '.join(found)}: {how}"))


def warn_of_code(file: Path, settings: Iterable[Setting]) -> None:
    """Print a warning if the file of --config names code and is in a run that this user did not sign."""
    found, folder = _code_in(settings), file.parent
    if not found or "RANK" in os.environ or not any((folder / name).exists() for name in (MANIFEST, "status.json")):
        return
    if not is_signed(read_manifest(folder) or {}):
        why = f"'{folder}', which you did not sign: it is trusted like a Makefile, and imports {', '.join(found)}"
        _print_once(visible(f"--config {file} is in {why}"))


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def adopts(folder: Path) -> bool:
    """Whether --trust accepts a checkpoint without a manifest, which it then gets if it can be written.

    Earlier versions wrote none, and copies may lack it.
    """
    if not _GIVEN.get() or not (folder / "config.yaml").is_file() or read_manifest(folder) is not None:
        return False
    refuse_code(folder, "config.yaml", settings := read_settings(folder / "config.yaml"))
    sha256 = settings[0].sha256 if settings else None
    if read_manifest(folder) is None and _sign(folder, "config.yaml", sha256) and "RANK" not in os.environ:
        print(f"trusted {folder}, which had no {MANIFEST}: signed '{folder}'", file=sys.stderr)
    return True


def _code_in(settings: Iterable[Setting]) -> list[str]:
    return list(dict.fromkeys(f"{s.key}={value_text(s.value)}" for s in settings if _names_code(s)))


def _names_code(setting: Setting) -> bool:
    if ":" in setting.key:  # rewards.your.module:term
        return True
    # the only key that also accepts your.module.Class
    if setting.key.rpartition(".")[2] == "model_class" and setting.value:
        return True
    value = setting.value
    if setting.key == "env.name" and isinstance(value, str) and value.startswith("gym:"):
        return value.removeprefix("gym:").rpartition(":")[0] not in ("", "gymnasium", "gymnasium_robotics", "sparring")
    if setting.key == "env.name" and isinstance(value, str) and value.partition(":")[0] in SIMULATORS:
        return False
    return any(_IMPORT_PATH.fullmatch(text) and not _HARMLESS.fullmatch(text) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """All text in a value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _texts(each)


def _is_own(folder: Path, name: str, sha256: str | None) -> bool:
    """Whether this user signed the folder and the file. `sha256`: checksum of the content that was read from it."""
    manifest = read_manifest(folder)
    if manifest is None or not is_signed(manifest) or damage(folder, manifest, [name]):
        return False
    return sha256 in (None, manifest["files"][name].get("sha256"))


def _sign(folder: Path, name: str, sha256: str | None) -> bool:
    """Sign the folder; False if it cannot be written or if this user has no key."""
    if os.environ.get("RANK", "0") != "0":  # one rank signs; the others trust the folder for this command
        return False
    found = sorted(path for pattern in _REST[name] for path in folder.glob(pattern))
    others = [str(path.relative_to(folder)) for path in found if path.is_file()]
    try:
        return sign(folder, name, others, sha256)
    except OSError:
        return False
