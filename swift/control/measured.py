"""What ranks have measured, as messages: (rank) `to_message` → coordinator → (anyone) `from_message`."""

from swift._pb import coordinator_pb2 as pb
from swift.recovery import RankMeasured, Sent, StageMeasured


def to_message(measured: RankMeasured) -> pb.RankMeasured:
    """The message for what one rank has measured; `from_message` is its inverse."""
    return pb.RankMeasured(
        step=measured.step,
        steps=measured.steps,
        microbatches=measured.microbatches,
        step_s=measured.step_s,
        update_s=measured.update_s,
        stages=[
            pb.StageMeasured(
                stage=stage.stage,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                sent=[pb.Sent(destination=sent.destination, bytes=sent.bytes) for sent in stage.sent],
                gradient_bytes=stage.gradient_bytes,
            )
            for stage in measured.stages
        ],
        other_bytes=measured.other_bytes,
        state_bytes=measured.state_bytes,
        checkpoint_bytes=measured.checkpoint_bytes,
        checkpoint_s=measured.checkpoint_s,
        checkpoint_stall_s=measured.checkpoint_stall_s,
        log_write_bytes_per_s=measured.log_write_bytes_per_s,
        log_full=measured.log_full,
        log_read_bytes=measured.log_read_bytes,
        log_read_wait_s=measured.log_read_wait_s,
    )


def from_message(message: pb.RankMeasured) -> RankMeasured:
    """ValueError: a value is out of its range."""
    return RankMeasured(
        step=message.step,
        steps=message.steps,
        microbatches=message.microbatches,
        step_s=message.step_s,
        update_s=message.update_s,
        stages=tuple(
            StageMeasured(
                stage=stage.stage,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                sent=tuple(Sent(destination=sent.destination, bytes=sent.bytes) for sent in stage.sent),
                gradient_bytes=stage.gradient_bytes,
            )
            for stage in message.stages
        ),
        other_bytes=message.other_bytes,
        log_full=message.log_full,
        **{
            field.name: value
            for field, value in message.ListFields()
            if field.has_presence and field.message_type is None
        },
    )
