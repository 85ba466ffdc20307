"""A small transformer under FSDP2: dense inside a group of shards, sparse between the replicas.

    torchrun --nproc-per-node 4 examples/fsdp_train.py

Four ranks are two replicas of two shards each. The model learns to continue arithmetic sequences modulo 32.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import thinwire
import thinwire.fsdp

SYMBOLS, LENGTH, WIDTH, LAYERS = 32, 16, 64, 2


class Transformer(nn.Module):
    """Symbols [b, t] -> logits of the next symbols [b, t, SYMBOLS]."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.symbols(x) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


def sequences(generator: torch.Generator, count: int = 32) -> tuple[Tensor, Tensor]:
    """Arithmetic sequences [count, LENGTH], and the same one place further."""
    start = torch.randint(SYMBOLS, (count, 1), generator=generator)
    step = torch.randint(1, 8, (count, 1), generator=generator)
    values = (start + step * torch.arange(LENGTH + 1)) % SYMBOLS
    return values[:, :-1], values[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small transformer under FSDP2; start it with torchrun.")
    parser.add_argument("--shards", type=int, default=2, help="ranks that share one replica (default 2)")
    parser.add_argument("--density", type=float, default=0.02, help="share of the entries sent (default 0.02)")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps (default 80)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("Start it with torchrun: torchrun --nproc-per-node 4 examples/fsdp_train.py")

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % args.shards:
        sys.exit(f"--shards is {args.shards}, which does not divide {world_size} ranks")
    mesh = init_device_mesh("cpu", (world_size // args.shards, args.shards), mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(1)  # the same weights on every rank
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options = thinwire.top_k(args.density)
    options.dense_below = 1024  # elements of a shard
    options.schedule = thinwire.Schedule(dense_steps=5)
    handle = thinwire.fsdp.attach(model, options, optimizer, replicate_group=mesh["replicate"])

    generator = torch.Generator().manual_seed(rank)
    for step in range(1, args.steps + 1):
        x, y = sequences(generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        if rank == 0 and (step == args.steps or step % 20 == 0):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if rank == 0:
        print(handle.report())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
