"""Held-out evaluation of policies, world models and explorers."""
