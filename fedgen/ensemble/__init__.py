"""What GS-WGAN and the systems of votes share: critics over parts of private rows, which answer
about a generator's images."""
