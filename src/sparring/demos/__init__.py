"""Recording of scripted experts as datasets, and inspection of datasets."""
