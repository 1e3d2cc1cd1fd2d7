"""Storage: where experience is kept."""

BUFFERS = {
    "standard": "sparring.data.rollout:RolloutBuffer",
    "vla": "sparring.data.ring:VLABuffer",
}
