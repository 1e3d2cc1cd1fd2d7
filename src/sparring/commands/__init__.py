"""A file per command: `add` declares it, and what it runs imports what it needs when it runs."""
