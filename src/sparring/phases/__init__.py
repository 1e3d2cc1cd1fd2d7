"""Phases: stages of training, each composed of the same parts."""

PHASES = {
    "finetune": "sparring.phases.finetune:Finetune",
    "imitate": "sparring.phases.imitate:Imitate",
    "teacher": "sparring.phases.teacher:Teacher",
    "student": "sparring.phases.student:Student",
}
ALIASES = {
    "phase1": "teacher",
    "wm": "teacher",
    "phase2": "student",
    "explorer": "student",
    "phase3": "adversarial",
    "adv": "adversarial",
}
# named in the documents this system comes from; they arrive with the world model
PLANNED = ("adversarial", "all")
