"""A vision-language-action model of our own, of pi0's shape."""
