"""Benchmarks: one part of swift against the limit of the machine it runs on, as ratios within one run."""
