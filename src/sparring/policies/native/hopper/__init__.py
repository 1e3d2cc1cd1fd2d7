"""Hand-written Hopper kernels that sample actions of the native VLA."""
