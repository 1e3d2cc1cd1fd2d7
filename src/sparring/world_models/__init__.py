"""World models: what the cameras will show after an action, with a memory of what they showed before."""

WORLD_MODELS = {"token": "sparring.world_models.token_model:TokenWorldModel"}
