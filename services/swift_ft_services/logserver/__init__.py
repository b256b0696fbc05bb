"""The log server. `python -m swift_ft_services.logserver --help`.

core            the log's state machine, without I/O: what is accepted, what is durable, what is refused
append_session  a writer's call, and group commits; committer: the thread that writes
reading         records of a stream in log order, with readahead
procedures      fence, trim, reset and drop, step by step; administration: who does them, and old logs
quotas          how much is kept, of how much
engine          joins core and storage; state: what they share, under one lock
storage         where records rest, and what is found at the start: segments, manifests; storage_interface
disk            the file system as the storage uses it
service         gRPC over the engine; metrics, server_stats
"""
