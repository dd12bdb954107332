"""A file of prompts in, a file of results out: reading, resuming, running and reporting a batch."""
