"""The log server: a core without I/O, a storage, an engine that joins them, gRPC around it."""
