"""The command line. Parsing, help and completion import nothing heavy; a command imports what it needs."""

import argparse
import errno
import faulthandler
import io
import logging
import os
import re
import sys
from contextlib import suppress
from itertools import pairwise

from sparring import __version__
from sparring.cli import config, runs, tasks, train
from sparring.cli.arguments import EPILOG, OPTIONS
from sparring.config import IMPORTED_FROM
from sparring.errors import UserError, VisibleFormatter, visible
from sparring.processes.heartbeat import OwnStages

# errors of the machine, and of paths that the user gave; any other OSError is a bug of this package
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MACHINE = (*_FULL, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.ESTALE, errno.EAGAIN)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO, errno.EOVERFLOW)
_USER = (*_FORBIDDEN, *_UNUSABLE)
_ADVICE = {
    **dict.fromkeys(_FULL, "make room, or give another folder; the same command resumes from the last checkpoint"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit (ulimit -n), or use fewer processes"),
    **dict.fromkeys(_FORBIDDEN, "give another path, or change its permissions"),
    errno.ENAMETOOLONG: "give a shorter name",
}


def main(argv: list[str] | None = None) -> int:
    # with argv given, Python code called this function: the process belongs to the caller
    OwnStages.is_ours = argv is None
    if OwnStages.is_ours and sys.stderr is not None:
        # print a stack if a C library crashes, e.g. that of an env
        faulthandler.enable()
    try:
        code = _exit_code(sys.argv[1:] if argv is None else argv)
    finally:
        if OwnStages.now is not None:
            OwnStages.now.end_reported()
    if OwnStages.now is not None and OwnStages.now.has_hung:
        # at its end the interpreter would wait for the thread that hangs
        sys.stdout.flush()
        os._exit(code)
    return code


def _exit_code(argv: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        # escape characters that the terminal cannot encode; flushing fails if the stream's descriptor was replaced
        with suppress(OSError):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
    # for warnings of commands that set up no logging
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    try:
        try:
            if any("\0" in word for word in argv):
                raise UserError("an argument contains a NUL character; remove it")
            # argparse returns a list for --output=--
            empty = [word for word in argv if re.fullmatch("--[a-z-]+=(--)?", word)]
            empty += [f"the argument after {before}" for before, word in pairwise(argv) if not word]
            if empty and argv[0] != "__complete":
                raise UserError(f"{empty[0]} is empty (a shell variable that is not set?); give a value")
            return _run(argv)
        finally:
            sys.stdout.flush()  # now, while a closed pipe can still be handled
    except UserError as error:
        from sparring.processes.heartbeat import is_first_report

        # a full disk ends with 1, whichever file could not be written
        is_full = getattr(error.__context__, "errno", None) in _FULL
        if is_first_report(str(error)):
            print(f"sparring: {visible(error)}{f'; {_ADVICE[errno.ENOSPC]}' if is_full else ''}", file=sys.stderr)
        return 1 if is_full else error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `sparring config finetune | head`
        _forget_stdout()
        return 0
    except Exception as raised:
        failed = _os_error(raised)
        if failed is None:
            from sparring.processes.child import describe_env_failure

            # the env is user code: report its error without our stack
            if (failure := describe_env_failure(raised)) is None:
                raise
            print(f"sparring: {visible(failure)}", file=sys.stderr)
            return 1
        try:
            sys.stdout.flush()
        except OSError:  # stdout itself cannot be written
            _forget_stdout()
        advice = f"; {_ADVICE[failed.errno]}" if failed.errno in _ADVICE else ""
        print(f"sparring: {visible(_file_of(failed))}{failed.strerror}{advice}", file=sys.stderr)
        return 2 if failed.errno in _USER else 1


def _os_error(error: Exception) -> OSError | None:
    """The OSError of the machine or of a given path behind `error`; Rust libraries put only its number in a message."""
    if isinstance(error, OSError):
        return error if error.errno in (*_MACHINE, *_USER) else None
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors
        return _os_error(OSError(int(match[1]), os.strerror(int(match[1]))))
    return None


def _file_of(error: OSError) -> str:
    return f"'{os.fsdecode(error.filename)}': " if isinstance(error.filename, (str, bytes)) else ""


def _forget_stdout() -> None:
    """Redirect stdout to /dev/null: otherwise flushing it at exit would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Defaults of a command's parser: `command` runs it; `takes_overrides`: it accepts
    `key=value`; `offered`: argument -> completions, or a function that returns them."""
    parser = argparse.ArgumentParser(
        "sparring", description="Train robot policies with reinforcement learning.", epilog=EPILOG, **OPTIONS
    )
    parser.add_argument("--version", action="version", version=f"sparring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (train, runs, tasks, config):
        module.add(commands)
    return parser


def _run(argv: list[str]) -> int:
    parser = build_parser()
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    commands = dict(subparsers.choices)
    if argv[:1] == ["__complete"]:
        print("\n".join(config.candidates(commands, argv[1:])))
        return 0
    _distrust_the_working_directory()
    given, command = argv, commands.get(argv[0], parser) if argv else parser
    overrides: list[str] = []
    takes_overrides = command.get_default("takes_overrides")
    # argparse would read `ppo.gamma=1` as a PHASE and would reject `--ppo.gamma 1`
    if takes_overrides:
        from sparring.config.text import split_overrides

        flags = {name: action.nargs != 0 for action in command._actions for name in action.option_strings}
        overrides, argv = split_overrides(_dry_run_in_one_word(argv), flags | {"--version": False})
    arguments, others = parser.parse_known_args(argv)
    if others:
        message = f"unrecognized arguments: {' '.join(others)}; `sparring {argv[0]} --help` lists the accepted ones"
        raise UserError(message + (_hint_on_settings(others) if takes_overrides else ""))
    arguments.argv = given
    if not getattr(arguments, "trust", False):
        return arguments.command(arguments, overrides) or 0
    from sparring.config.trust import trusting

    with trusting():
        return arguments.command(arguments, overrides) or 0


def _distrust_the_working_directory() -> None:
    """Import only your.module:Class from it, nothing else: it may be a run folder of another user."""
    with suppress(FileNotFoundError):
        IMPORTED_FROM[:] = [os.getcwd()]
    # numba would read these from .numba_config.yaml there, and load code from that cache
    for name in ("NUMBA_CACHE_DIR", "NUMBA_CACHE_LOCATOR_CLASSES"):
        os.environ.setdefault(name, "")


def _dry_run_in_one_word(argv: list[str]) -> list[str]:
    """`--dry-run rollout` -> `--dry-run=rollout`: argparse would read any following word as its value."""
    words: list[str] = []
    for word in argv:
        if words[-1:] == ["--dry-run=training"] and word in train.DRY_RUNS:
            words[-1] = f"--dry-run={word}"
        else:
            words.append("--dry-run=training" if word == "--dry-run" else word)
    return words


def _hint_on_settings(others: list[str]) -> str:
    from sparring.config.schema import Config

    key, value = [*others, ""][:2]
    return f". Write settings as {key}={value}" if key.partition(".")[0] in Config.model_fields else ""
