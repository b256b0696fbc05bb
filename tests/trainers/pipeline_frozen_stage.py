"""The first stage is frozen; its optimizer has nothing to do."""

# verdict: same bits
# worlds: 2

import probe

import swift_ft

with swift_ft.Session.from_env(checkpoint_every=5) as session:
    module, schedule, optimizer = probe.pipeline(session)
    module.requires_grad_(session.pipeline_rank > 0)
    train_step = probe.usual_pass(session, schedule, optimizer)
    probe.run(session, train_step, module=module, optimizer=optimizer)
