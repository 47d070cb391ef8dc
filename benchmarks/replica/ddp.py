"""The same training by PyTorch's DistributedDataParallel over gloo.

ddp.py PORT INDEX ADDRESS
"""

from __future__ import annotations

import sys

import torch
from step_server import LAYERS, ROWS, WIDTH, serve
from torch import nn

port, index, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=index, world_size=2)
layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def step() -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


serve(port, f"ddp {index}", step)
