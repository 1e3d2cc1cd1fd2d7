"""A CPU renderer for the cameras of the built-in arm."""
