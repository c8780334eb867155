"""Privacy: mechanisms, events, accountants, ledgers. The only room where noise is drawn."""
