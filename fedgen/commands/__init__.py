"""Commands: one file per command."""
