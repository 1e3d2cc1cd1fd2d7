"""Pretrained vision-language-action models of anybody's, behind the one Policy interface."""
