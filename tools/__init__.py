"""The `coremill` command and its verbs."""
