"""`sparring prune`."""

import sys
from pathlib import Path

from sparring.commands.arguments import OPTIONS, count, positive
from sparring.commands.words import size
from sparring.errors import UserError


def add(commands) -> None:
    prune = commands.add_parser("prune", help="remove checkpoints, but for the best and the last", **OPTIONS)
    prune.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    prune.add_argument("--keep-best", type=count, default=1, metavar="K", help="as evaluations tell (default: 1)")
    prune.add_argument("--keep-last", type=positive, default=1, metavar="L", help="the newest (default: 1)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    prune.set_defaults(command=_prune)


def _prune(arguments, overrides) -> int:
    from sparring.prune import carry_out, plan

    # all of them before the first is touched; each once
    runs = dict.fromkeys(map(Path, arguments.runs))
    prunings = [plan(run, arguments.keep_best, arguments.keep_last) for run in runs]
    for pruning in prunings:
        kept = ", ".join(f"{path.name} ({why})" for path, why in pruning.kept.items())
        removed = f"removes {len(pruning.removed)}, {size(pruning.bytes)}" if pruning.removed else "nothing to remove"
        doubt = "" if pruning.rated or not arguments.keep_best else "; no evaluation tells which are best"
        print(f"{pruning.run}: keeps {kept}; {removed}{doubt}")
    total, bytes_freed = sum(len(p.removed) for p in prunings), sum(p.bytes for p in prunings)
    if arguments.dry_run or not total:
        return 0
    unrated = [f"'{p.run}'" for p in prunings if p.removed and not p.rated]
    if arguments.yes and arguments.keep_best and unrated:
        raise UserError(
            f"{', '.join(unrated)}: no evaluation tells which checkpoints are best; give --keep-best 0 to keep "
            "the last only (--keep-last L), or leave out --yes to be asked"
        )
    if not arguments.yes and not _agreed(total):
        print("nothing was removed")
        return 0
    for pruning in prunings:
        carry_out(pruning)
    print(f"freed {size(bytes_freed)}")
    return 0


def _agreed(total: int) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody is here to be asked; give --yes to remove them, or --dry-run to only look")
    return input(f"remove {total} checkpoints for good? [y/N] ").strip().lower() in ("y", "yes")
