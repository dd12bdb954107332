"""`coremill top`: what the workers of a running coordinator do, in a terminal, as JSON or as a picture."""
