"""The coordinator: membership, generations, recovery. `python -m swift_ft_services.coordinator --help`.

job          the state machine of one job: commands and a clock reading in, effects out; no I/O
commands     commands, effects and refusals; checks: validation of commands against the job's state
job_record   the durable state of a job and its encoding; store: the database that holds it
planning     conversion between a row and the planner, vacant slots; endings, restarts, checkpoints, liveness
log_placement  which log servers are in use, and where streams are kept; log_calls: the calls to log servers
communicators  jobs of the members of a `swift_ft.Communicator`
driver       takes commands in turns, makes them durable, carries out effects, publishes Views
service      the gRPC interface of the driver; views: the messages and texts that it shows
timeouts     every timeout, derived from two numbers
metrics      counters, and numbers of each job at scrape time
"""
