"""Sparring's own vision-language-action model, with pi0's architecture."""
