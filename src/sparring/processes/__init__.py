"""Child processes, ranks, heartbeats, shared memory and files."""
