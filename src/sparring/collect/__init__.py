"""Collecting: the only place where an env meets a policy."""
