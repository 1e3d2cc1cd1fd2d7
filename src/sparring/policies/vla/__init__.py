"""Custom pretrained vision-language-action models as policies."""
