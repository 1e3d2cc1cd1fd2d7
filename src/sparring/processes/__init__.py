"""Child processes, ranks, heartbeats and memory that they share."""
