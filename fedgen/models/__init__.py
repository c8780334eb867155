"""Networks: generators, critics, classifiers; all functions of explicit parameters."""
