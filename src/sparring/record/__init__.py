"""Writes metrics, videos, logs and progress; no other package does."""
