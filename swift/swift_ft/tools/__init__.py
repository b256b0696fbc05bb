"""Operator commands, a module each: `swift-ft status`, `jobs`, `logs`, `inspect`, `export`, `doctor`, `token`."""
