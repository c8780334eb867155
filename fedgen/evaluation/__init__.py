"""Sample quality: features, statistics, metrics."""
