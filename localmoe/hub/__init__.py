"""Models on this machine: reads weight-file headers, lists and resolves models. Loads no weights."""
