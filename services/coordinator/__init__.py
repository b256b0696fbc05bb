"""The coordinator: membership, generations, recovery. `python -m services.coordinator --help`.

core       the state machine of one job: commands and a clock reading in, effects out; no I/O
row        what is durable of a job; parts, tables: how it is stored, and which of it has changed
store      where that is kept
places     which log servers are in use, and what is where
leases     who has not been heard for too long
logs       what the coordinator asks of log servers
driver     takes commands in turns, makes them durable, carries out effects, publishes views
updates    what watchers are told of a view
servicer   gRPC in front of the driver
"""
