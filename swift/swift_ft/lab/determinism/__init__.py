"""`swift-ft verify-determinism`: checks whether a script resumes exactly. `runs` runs it, `verify` compares."""
