"""Collection of rollouts: the only place where a policy acts in an env."""
