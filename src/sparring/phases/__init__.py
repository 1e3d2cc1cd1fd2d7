"""Phases: stages of training, each composed of the same parts."""

PHASES = {
    "finetune": "sparring.phases.finetune:Finetune",
    "imitate": "sparring.phases.imitate:Imitate",
    "teacher": "sparring.phases.teacher:Teacher",
    "student": "sparring.phases.student:Student",
    "adversarial": "sparring.phases.adversarial:Adversarial",
}
# what `sparring train all` runs, in this order
CHAIN = ("teacher", "student", "adversarial")
ALIASES = {
    "phase1": "teacher",
    "wm": "teacher",
    "phase2": "student",
    "explorer": "student",
    "phase3": "adversarial",
    "adv": "adversarial",
}
