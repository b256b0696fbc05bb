"""Optimizers whose steps can be applied bucket by bucket and taken back. No session, no groups: torch alone."""
