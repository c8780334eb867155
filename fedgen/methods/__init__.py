"""One file per method, the paper named at the top."""
