"""`coremill bench`: this machine, a model on it, and whole engines. One module per command, and what they share."""
