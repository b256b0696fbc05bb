"""Words are numbered in the order of a set, which is another one in each process."""

# verdict: NOT DETERMINISTIC
# cause: unseeded-rng
# says: PYTHONHASHSEED=0
# interpreters

import os

import torch
from torch import nn

TEXT = """so much depends upon a red wheel barrow glazed with rain water
    beside the white chickens""".split()  # noqa: SIM905
number = {word: place for place, word in enumerate(set(TEXT))}
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(len(number), 8), nn.Linear(8, len(number)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
tokens = torch.tensor([number[word] for word in TEXT])
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 6):
    loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
