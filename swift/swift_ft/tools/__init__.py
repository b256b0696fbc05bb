"""Operator commands: `swift-ft status`, `jobs` and `logs` (status), `inspect`, `export`, `doctor`, `token`."""
