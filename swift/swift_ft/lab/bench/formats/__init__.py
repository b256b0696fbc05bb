"""`swift-ft bench checkpoint --formats`: the cost of each checkpoint format, and the information that it loses."""
