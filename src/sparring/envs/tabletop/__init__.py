"""The built-in robot arm on a table."""
