"""Hand-written Hopper kernels that decide as the native VLA does."""
