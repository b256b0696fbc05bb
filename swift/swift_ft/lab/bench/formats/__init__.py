"""`swift-ft bench checkpoint --formats`: what each format of a checkpoint costs, and what it loses."""
