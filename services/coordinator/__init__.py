"""The coordinator: membership, generations, recovery. `python -m services.coordinator --help`.

core       the state machine of one job: commands and a clock reading in, effects out; no I/O
row        what is durable of a job
store      where rows are kept
places     which log servers are in use, and what is where
leases     who has not been heard for too long
logs       what the coordinator asks of log servers
driver     carries out effects, publishes views
servicer   gRPC in front of the driver
"""
