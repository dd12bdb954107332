"""One pinned process per core group: the engine loop, architectures as plans, sampling, counters."""
