"""How good the samples are: features, statistics, numbers."""
