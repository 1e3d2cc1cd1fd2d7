"""A double of hf-libero: the names and parameters that the adapter uses, without robosuite and without scenes."""
