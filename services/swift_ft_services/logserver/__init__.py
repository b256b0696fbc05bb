"""The log server. `python -m swift_ft_services.logserver --help`.

core            the log's state machine, without I/O: what is accepted, what is durable, what is refused
append_session  a writer's call, and group commits
reading         records of a stream in log order, with readahead, or by files that are lent
procedures      fence, trim, reset and drop, step by step; administration: executes them, and drops old logs
quotas          space limits and alarms
engine          joins core and storage, with the threads that write; state: shared by both, under one lock
storage         segment files and manifests on disk, and their recovery at the start; storage_interface
disk            the file system interface of the storage
service         gRPC service; metrics
"""
