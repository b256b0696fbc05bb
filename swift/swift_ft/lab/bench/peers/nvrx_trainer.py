"""The trainer of `swift-ft bench recovery` for NVRx: its in-process restart, with a third process in reserve.

After the loss the survivor calls the function again, and the reserve takes the lost rank's place. Both load the newest
checkpoint (torch.distributed.checkpoint). The restart has its default settings. torchrun is not used, because it would
end the survivor as well.
"""

import os
from typing import Optional

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel

from swift_ft.lab.bench.peers.torchrun_trainer import Training, train
from swift_ft.lab.bench.peers.trial import REPLICAS, Trial, make_model


def main() -> None:
    trial = Trial.given()
    port, first = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = TCPStore("127.0.0.1", port, is_master=first == 0, wait_for_workers=False)

    assignment = inprocess.rank_assignment
    two = inprocess.Compose(assignment.MaxActiveWorldSize(REPLICAS), assignment.ShiftRanks())

    @inprocess.Wrapper(store_kwargs={"port": port + 1}, rank_assignment=two)  # type: ignore[untyped-decorator]
    def begin(call_wrapper: Optional[inprocess.CallWrapper] = None) -> None:  # noqa: UP045  (it looks for this)
        assert call_wrapper is not None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        own = PrefixStore(str(call_wrapper.iteration), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
        trial.mark("connected", rank)
        training = Training(DistributedDataParallel(make_model()))
        train(trial, rank, training, lambda where: save({"training": training}, checkpoint_id=where))
        trial.end(rank, training.model)
        dist.destroy_process_group()

    begin()


if __name__ == "__main__":
    main()
