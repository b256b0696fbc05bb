"""A plain pipeline under 1F1B."""

# verdict: same bits
# worlds: 2, 4
# device

import probe

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)
