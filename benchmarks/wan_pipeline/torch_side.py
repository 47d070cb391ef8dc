"""One site of the pipeline in PyTorch: torch.distributed.pipelining, gloo, 1F1B.

Run by run.py, in PyTorch's own environment; prints the seconds of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Block(nn.Module):
    """Causal self-attention, then a feed-forward part; each normalises its input and adds to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        rows, length, width = hidden.shape
        split = self.qkv(self.attention_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.narrow(nn.functional.gelu(self.wide(self.inner_norm(hidden))))


class FirstHalf(nn.Module):
    """The embedding and the first half of the blocks."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(a.vocabulary, a.width), nn.Embedding(a.length, a.width)
        self.blocks = nn.Sequential(*(Block(a.width, a.heads) for _ in range(a.blocks // 2)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute hidden vectors from tokens."""
        return self.blocks(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))


class SecondHalf(nn.Module):
    """The other blocks and the output."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(a.width, a.heads) for _ in range(a.blocks - a.blocks // 2)))
        self.norm, self.output = nn.LayerNorm(a.width), nn.Linear(a.width, a.vocabulary)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits from hidden vectors."""
        return self.output(self.norm(self.blocks(hidden)))


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, a mean over tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Join the other site and run the steps."""
    parser = argparse.ArgumentParser()
    for name in ("rows", "length", "vocabulary", "width", "heads", "blocks", "micro_batches", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    parser.add_argument("--address", required=True, help="HOST:PORT of site 0")
    a = parser.parse_args()
    rank = int(os.environ["WAN_SITE"])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"tcp://{a.address}", rank=rank, world_size=2)
    module = FirstHalf(a) if rank == 0 else SecondHalf(a)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    # On every rank: no loss would mean no backward.
    schedule = Schedule1F1B(stage, a.micro_batches, loss_fn=compute_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(2)
    seconds = []
    for _ in range(a.steps):
        tokens = torch.randint(a.vocabulary, (a.rows, a.length), generator=draw)
        targets = torch.randint(a.vocabulary, (a.rows, a.length), generator=draw)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"site": rank, "median": statistics.median(seconds[2:]), "seconds": seconds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
