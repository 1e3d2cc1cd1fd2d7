"""A run: its loop, its folder, its checkpoints."""
