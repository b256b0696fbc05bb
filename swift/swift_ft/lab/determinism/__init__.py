"""`swift-ft verify-determinism`: is a script resumed exactly? `verify` compares records, `runs` starts the runs."""
