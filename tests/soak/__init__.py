"""Soaks of the log: kills at full rate, and an account of every record (`scripts/soak`)."""
