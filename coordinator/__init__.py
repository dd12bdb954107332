"""Owns jobs, sequences, block tables, the prefix index, the journal and the workers' lives."""

__all__ = ["Completion", "Coordinator", "Job"]


def __getattr__(name: str):
    # Lazily: the text helper and the batch runner import their own parts only.
    if name in __all__:
        from coremill.coordinator import api

        return getattr(api, name)
    raise AttributeError(f"module 'coremill.coordinator' has no attribute {name!r}")
