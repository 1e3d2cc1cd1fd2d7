"""Collection in a process of its own (rollout.mode=async)."""
