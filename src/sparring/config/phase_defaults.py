"""What a phase means where nobody says otherwise: below all that is given, above the defaults of the sections."""

_PLAYGROUND = {
    "env.task": ["explore"],
    "env.cameras": ["head", "wrist"],
    # what a camera does not show must be remembered, not read from the state
    "env.object_state": "hidden",
    # a decision lasts 160 ms: long enough for something to change
    "rollout.action_steps": 4,
}
# what differs in the env comes with the teacher
_EXPLORER = _PLAYGROUND | {
    # two episodes of each robot
    "rollout.steps": 50,
    # noise that lasts for an episode: from the first day the hand gets to where things are
    "policy.distribution": "gsde",
    "policy.sde_sample_freq": 25,
    "policy.init_std": 0.3,
    "ppo.gamma": 0.99,
    "ppo.policy_lr": 5e-4,
    "ppo.critic_lr": 1e-3,
    # returns are large: with more of their error the encoder they share is the critic's, and its features saturate
    "ppo.value_loss_coef": 0.02,
    "ppo.mini_batch_size": 200,
    "ppo.ppo_epochs": 4,
    "ppo.target_kl": 0.05,
}
# phase -> dotted key -> value; those of `env` are for the built-in arm
DEFAULTS = {
    "teacher": _PLAYGROUND
    | {
        # an episode of each robot
        "rollout.steps": 25,
        "training.log_every": 5,
        "training.save_every": 20,
    },
    "student": _EXPLORER,
    "adversarial": _EXPLORER | {"training.log_every": 5, "training.save_every": 10},
}
# finetune with `pretrained`, algorithm -> key of its section -> value: what can do something already is soon unlearned
_CAREFUL = {"policy_lr": 1e-4, "target_kl": 0.05}
OF_PRETRAINED = {
    # its critic knows nothing yet, and may learn faster
    "ppo": _CAREFUL | {"critic_lr": 1e-3, "critic_warmup_updates": 3},
    "grpo": _CAREFUL,
}
