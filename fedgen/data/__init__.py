"""Data sets as uint8 arrays with real labels, and their partitions over clients."""
