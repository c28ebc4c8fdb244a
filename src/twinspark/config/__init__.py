"""Settings: frozen dataclasses for the model (from a pack), the engine and the server.

`model.py` is what a pack's config.json says; `engine.py` and `server.py` are what a user chooses;
`load.py` joins flags, one TOML file and `env.py`; `paths.py` knows where package files lie.
Nothing else reads settings or the environment.
"""
