"""Measures: how well a world model predicts, and how well a policy explores, each beside its baselines."""
