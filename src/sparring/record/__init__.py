"""Recording: the only writers of numbers, pictures and progress."""
