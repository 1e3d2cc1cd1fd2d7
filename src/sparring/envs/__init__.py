"""Envs: N robots in a simulator, stepped together."""

ENVS = {"tabletop": "sparring.envs.tabletop.backend:Tabletop"}
