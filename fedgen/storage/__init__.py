"""Files: atomic writes, untrusted files, run directories."""
