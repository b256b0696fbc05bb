"""Runs other people's trainers: undisturbed, killed, and says what came of it."""
