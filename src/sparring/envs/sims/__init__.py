"""Adapters of other simulators, a module each. They import their simulator only when they make an env."""
