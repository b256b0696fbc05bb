"""The log as its users see it: records, frames, segment files, and the client that appends and reads them."""
