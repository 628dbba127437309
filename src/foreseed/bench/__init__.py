"""Benchmarks that anyone can run again: `foreseed bench engine`, `memory`, `prune` and so on.

Nothing is imported here, so that the small process whose memory is measured can live in this package.
"""
