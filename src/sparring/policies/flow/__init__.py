"""Flow-matching policies."""
