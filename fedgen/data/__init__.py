"""Data sets as uint8 arrays with labels, and their partitions over clients."""
