"""What runs inside a trainer's process. Read `session` first: it makes the parts, `engine` runs them.

session                 what a trainer sees; registration; makes all parts of a session
config                  settings, and what must be equal on all ranks
engine                  a rank's life: steps, and recoveries between them
step                    one step: done to its end, or dropped; the line that a trainer reports of it
training_state          everything that a step changes, taken back if the step is dropped
updates                 from gradients to an update that all ranks apply or none: reducer, tied_weights,
                        pipeline_collectives, lossy (a step that is finished with the gradients that are left)
stage                   pipeline stages that log: boundary_log (records, or answers from the log), log_session
tape, collective_policy collectives: recorded, and which of them a trainer may use
coordinator_session     membership: join, lease, notices; generation: the groups of the current View
replay                  gets a rank to the plan's version: strategies, shared_replay, replay_helper, gradient_chain
checkpointing           checkpoints and early checkpoints; snapshots: copies in host memory
staggering              steps that begin while other stages finish theirs
batch_redistribution    batches of vacant ranks: rerouting, rerouted_call, gradient_sums
recording, rehearsal    what a rank notes of a step, and the process that does the step again and compares
step_digests            what a step took in and gave: transcript; verification compares replicas and runs
fault_points            failures at exact coordinates
communicator            `swift_ft.Communicator`, for scripts without a session
"""
