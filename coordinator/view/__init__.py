"""What is shown of a run while it works: figures, rates, tables."""
