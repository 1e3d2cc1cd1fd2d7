"""Envs: N robots in a simulator, stepped together."""

ENVS = {"tabletop": "sparring.envs.tabletop.backend:Tabletop", "dataset": "sparring.envs.recorded:Recorded"}
# other simulators: prefix of env.name -> function (rest of the name, **env.kwargs) that makes a gymnasium env
SIMS = {
    "metaworld": "sparring.envs.sims.metaworld:make",
    "robosuite": "sparring.envs.sims.robosuite:make",
    "mimicgen": "sparring.envs.sims.mimicgen:make",
    "aloha": "sparring.envs.sims.aloha:make",
    "maniskill": "sparring.envs.sims.maniskill:make",
    "libero": "sparring.envs.sims.libero:make",
    "robotwin": "sparring.envs.sims.robotwin:make",
}
