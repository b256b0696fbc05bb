"""The trainer of `swift-ft bench recovery` for swift: two replicas of a whole model."""

import swift_ft
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial, make_model, make_optimizer


def main() -> None:
    trial = Trial.given()
    session = swift_ft.Session.from_env(
        replicas=REPLICAS,
        checkpoint_every=trial.every,
        strategy=trial.strategy,
        snapshot_every=max(1, trial.every // 10) if trial.strategy == "snapshot" else 0,
        allow_inexact=trial.strategy == "lossy-forward",
    )
    replica = session.dp_rank
    trial.mark("connected", replica)
    model = session.module(make_model())
    optimizer = session.optimizer(make_optimizer(model))

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        loss = trial.loss(model, session.dp_rank, step)
        trial.maybe_die(replica, step, "forward")
        try:
            loss.backward()  # type: ignore[no-untyped-call]
            trial.maybe_die(replica, step, "backward")
            optimizer.step()
        except Exception:
            trial.mark("broken", replica, step)
            raise
        trial.maybe_die(replica, step, "update")
        trial.mark("stepped", replica, step)

    session.run(train_step, num_steps=trial.steps)
    trial.end(replica, model)
    session.close()


if __name__ == "__main__":
    main()
