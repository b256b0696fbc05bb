"""Code that runs inside a trainer's process. Read `session` first: it creates the parts, `engine` runs them.

session                 the trainer's interface; registration; creates all parts of a session
config                  settings, and those that must be equal on all ranks
engine                  a rank's life cycle: steps, and recoveries between them
participants            what takes part in each step, by the settings
step                    one step: completed or dropped; the line that a trainer reports of it
training_state          all state that a step changes, rolled back if the step is dropped
updates                 from gradients to an update that all ranks apply or none: reducer, pipeline_collectives,
                        lossy (finishes an interrupted step with the remaining ranks)
stage                   pipeline stages that log: boundary_log (records, or answers from the log), log_session
collective_policy       which collectives a trainer may use: set_up (before the run)
coordinator_session     membership: join, lease, notices; generation: the groups of the current View
replay                  gets a rank to the plan's version: strategies, shared_replay, replay_helper, gradient_chain
checkpointing           checkpoints and early checkpoints; snapshots: copies in host memory
staggering              steps that begin while other stages finish theirs
batch_redistribution    batches of vacant ranks: rerouting, rerouted_call
recording, rehearsal    recording of a step, and the process that repeats the step and compares
step_digests            digests of a step's inputs and results: transcript; verification compares replicas and runs
fault_points            fault injection at exact coordinates
communicator            `swift_ft.Communicator`, for scripts without a session
"""
