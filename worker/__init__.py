"""One pinned process per core group: the step loop, architectures as plans, binding of weights, stop strings."""
