"""Tasks of the built-in arm."""
