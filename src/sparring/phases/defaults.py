"""What a phase means where nobody says otherwise: below all that is given, above the defaults of the sections."""

# phase -> dotted key -> value; those of `env` are for the built-in arm
DEFAULTS = {
    "teacher": {
        "env.task": ["explore"],
        "env.cameras": ["head", "wrist"],
        # what a camera does not show must be remembered, not read from the state
        "env.object_state": "hidden",
        # a decision lasts 160 ms: long enough for something to change
        "rollout.action_steps": 4,
        # an episode of each robot
        "rollout.steps": 25,
        "training.log_every": 5,
        "training.save_every": 20,
    },
}
