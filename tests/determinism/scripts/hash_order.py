"""Words are numbered in the order of a set, which is another one in each process."""

# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: PYTHONHASHSEED=0
# interpreters

import own
import torch
from torch import nn

TEXT = """so much depends upon a red wheel barrow glazed with rain water
    beside the white chickens""".split()  # noqa: SIM905
number = {word: place for place, word in enumerate(set(TEXT))}
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(len(number), 8), nn.Linear(8, len(number)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
tokens = torch.tensor([number[word] for word in TEXT])
for _ in own.steps(6, model=model):
    loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
