"""What is in the log: of a running server, or of a directory; verified, exported, dropped."""
