"""Privacy: mechanisms, events, accountants, ledgers. The only package that samples noise."""
