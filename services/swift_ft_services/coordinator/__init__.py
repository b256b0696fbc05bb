"""The coordinator: membership, generations, recovery. `python -m swift_ft_services.coordinator --help`.

job          the state machine of one job: commands and a clock reading in, effects out; no I/O
commands     what goes in, what comes out, and refusals; checks: may this process say this now?
job_record   all that is durable of a job, and how it is stored; store: where
planning     from a record to the planner and back, vacant slots; endings, restarts, checkpoints, liveness
log_placement  which log servers are in use, and what is where; log_calls: what they are asked
communicators  members of a `swift_ft.Communicator`
driver       takes commands in turns, makes them durable, carries out effects, publishes views
service      gRPC in front of the driver; views, text: what it shows
timeouts     every timeout, derived from two numbers
metrics      what is counted, and numbers of each job at scrape time
"""
