"""Reports, figures and progress of runs."""
