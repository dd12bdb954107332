"""Owns jobs, sequences, block tables, the prefix index, the journal and the workers' lives."""
