"""Findings of `sparring check`, and how they are printed."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sparring.errors import UserError, describe_error, visible

OK, NOTE, WARNING, ERROR = "ok", "note", "warn", "error"  # an error fails the check; a note may be right as it is
_NAMES = {ERROR: "error", WARNING: "warning", NOTE: "note"}


@dataclass(frozen=True)
class Finding:
    """One line of the output. `fix`: how to correct what was found; findings that are ok have none."""

    what: str
    found: str
    severity: str = OK
    fix: str = ""

    @classmethod
    def of_error(cls, what: str, error: BaseException, fix: str) -> "Finding":
        """`fix`: advice for errors that are not ours; a UserError ends with its own."""
        if isinstance(error, SystemExit):
            fix = "raise another exception: SystemExit ends the whole process"
            return cls(what, f"the code ended the process: {describe_error(error)}", ERROR, fix)
        if not isinstance(error, UserError):
            return cls(what, describe_error(error), ERROR, fix)
        found, _, own = str(error).rpartition("; ")
        return cls(what, found or own, ERROR, own if found else fix)


def report(findings: Iterable[Finding]) -> int:
    """Print findings as they come, and their number; returns 1 if there is an error."""
    began, counts = time.monotonic(), Counter[str]()
    for finding in findings:
        counts[finding.severity] += 1
        print(f"{finding.severity:5} {finding.what}: {visible(finding.found)}", flush=True)
        if finding.fix:
            print(f"      fix: {visible(finding.fix)}", flush=True)
    numbers = [(counts[severity], name) for severity, name in _NAMES.items()]
    summary = ", ".join(f"{number or 'no'} {name}{'s' * (number != 1)}" for number, name in numbers)
    print(f"{summary} in {time.monotonic() - began:.1f} s")
    return 1 if counts[ERROR] else 0
