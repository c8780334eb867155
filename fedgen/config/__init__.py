"""Settings: composition by Hydra, types, validation, construction."""
