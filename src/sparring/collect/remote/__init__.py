"""Collection in a separate process (rollout.mode=async)."""
