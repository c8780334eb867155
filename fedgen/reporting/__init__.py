"""The run directory, figures and progress."""
