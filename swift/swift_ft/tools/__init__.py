"""What operators ask: `swift-ft status`, `jobs`, `logs`, `inspect`, `export`, `doctor`, `token`. A module for each."""
