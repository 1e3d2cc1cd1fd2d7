"""Phases: the stages of training, composed of the same parts."""

import difflib
from typing import Any

PHASES = {
    "finetune": "sparring.phases.finetune:Finetune",
    "imitate": "sparring.phases.imitate:Imitate",
    "teacher": "sparring.phases.teacher:Teacher",
    "student": "sparring.phases.student:Student",
    "adversarial": "sparring.phases.adversarial:Adversarial",
}
# the phases of `sparring train all`, in this order
CHAIN = ("teacher", "student", "adversarial")
ALIASES = {"phase1": "teacher", "wm": "teacher", "phase2": "student", "explorer": "student"}
ALIASES |= {"phase3": "adversarial", "adv": "adversarial"}


def unknown_phase(name: Any, *more: str) -> str:
    """Returns the error message for a name that is neither a phase nor one of `more`."""
    near = difflib.get_close_matches(str(name), [*PHASES, *more, *ALIASES], n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"unknown phase; expected one of: {', '.join([*PHASES, *more])}{hint}"
