"""Parallelism that trainers write themselves, inside of stages of two ranks: `inside.py STEPS HOW`, with four ranks.

HOW is experts: each rank has some of the experts of a layer, and tokens go to theirs by all-to-all, as many as the
router says. Or context: each rank has a part of every sequence, and attention gathers the keys and values of all parts.
In both, each rank has a part of the tokens, so it sums the gradients of the weights that both ranks have.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import swift_ft

STEPS, HOW = int(sys.argv[1]), sys.argv[2]
WIDTH, LENGTH, BATCH, MICROBATCHES = 6, 8, 4, 4
RANKS, EXPERTS = 2, 4


class Experts(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        self.router = nn.Linear(WIDTH, EXPERTS)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        own = EXPERTS // RANKS
        self.experts = nn.ModuleList(every[rank * own : (rank + 1) * own])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weight, chosen = self.router(tokens).softmax(dim=1).max(dim=1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        given, taken = (counts.view(RANKS, -1).sum(dim=1).tolist() for counts in (sent, received))
        there = functional.all_to_all_single_autograd(tokens[order], taken, given, self.group)
        pieces = list(there.split(received.tolist()))  # by rank, then by expert
        done = [torch.tanh(self.experts[n % len(self.experts)](piece)) for n, piece in enumerate(pieces)]
        back = functional.all_to_all_single_autograd(torch.cat(done), given, taken, self.group)
        return x + (back[order.argsort()] * weight[:, None]).view_as(x)


class Context(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank = group, dist.get_rank(group)
        self.taken = nn.Linear(WIDTH, 3 * WIDTH)
        self.given = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.taken(x).chunk(3, dim=2)
        keys, values = (
            functional.all_gather_tensor_autograd(part.contiguous(), 1, self.group) for part in (key, value)
        )
        place = torch.arange(LENGTH)
        later = place > place.chunk(RANKS)[self.rank][:, None]
        scores = (query @ keys.transpose(1, 2)).masked_fill(later, float("-inf"))
        return x + self.given(scores.softmax(dim=2) @ values)


def main() -> None:
    session = swift_ft.Session.from_env(checkpoint_every=5, tensor_parallel=RANKS)
    index = session.pipeline_rank
    group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    torch.manual_seed(index)
    layer = Experts if HOW == "experts" else Context
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(group), nn.Dropout(0.1))
    of_both = [p for name, p in module.named_parameters() if ".experts." not in name]
    stage = session.pipeline_stage(module, index, 2)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=0.02))
    session.register(schedule=schedule)

    def train_step(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        part, target = (
            each.chunk(RANKS, dim=1)[session.tp_rank].contiguous() for each in (x, x.roll(1, dims=2))
        )
        optimizer.zero_grad()
        schedule.step(*([part] if index == 0 else []), **({} if index == 0 else {"target": target}))
        for parameter in of_both:
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    main()
