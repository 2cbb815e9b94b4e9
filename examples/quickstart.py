"""The README's example: fit a model into three quarters of its memory and train it."""

import torch
from torch import nn

import remat

model = nn.Sequential(
    *[nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)]
)
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(1024, 512), torch.randn(1024, 512)

plan = remat.fit(model, (x,), budget="75%", optimizer=optimizer)
print(plan)  # peak, extra time, proved bound, what is computed again

for _ in range(3):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
