"""Recording: the only writers of metrics, videos, logs and progress."""
