"""Privacy: mechanisms, events, accountants, ledgers. The only package in which noise is drawn."""
