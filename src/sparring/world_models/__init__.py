"""World models: predict the next camera frames from the current frames, an action and a memory."""

WORLD_MODELS = {"token": "sparring.world_models.token_model:TokenWorldModel"}
