"""Training runs: setup, training, resuming, metrics, publication, privacy report."""
