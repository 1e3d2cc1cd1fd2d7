"""Recording of scripted experts as datasets, and a look into datasets."""
