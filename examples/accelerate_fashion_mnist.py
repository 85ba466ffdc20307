"""Trains a small CNN on Fashion-MNIST with Accelerate, its gradients reduced by thinwire.

    torchrun --nproc-per-node 2 examples/accelerate_fashion_mnist.py --steps 400

Ranks are processes on CPU, connected by Gloo. Needs `pip install accelerate`.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from fashion_mnist import BATCH, LEARNING_RATE, MOMENTUM, network, read_images
from fashion_mnist_data import locate
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import thinwire.ddp


def train(args: argparse.Namespace) -> tuple[Accelerator, nn.Module, thinwire.ddp.Handle, float]:
    """Trains for some steps; returns the accuracy on the test set too. Every rank calls it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(args.seed)
    net = network("T1s")
    model, optimizer, batches, tests = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        loader(args, "train", BATCH // accelerator.num_processes // args.accumulate),
        loader(args, "test", 250),
    )

    # All there is of thinwire: attach it to what prepare() returned, and let each rank save its state with the rest.
    options = thinwire.redsync(density=args.density)
    options.schedule = thinwire.Schedule(dense_steps=args.warmup)
    handle = thinwire.ddp.attach(model, options, optimizer)
    file = f"thinwire_{accelerator.process_index}.pt"
    accelerator.register_save_state_pre_hook(
        lambda _models, _weights, to: torch.save(handle.state_dict(), f"{to}/{file}")
    )
    accelerator.register_load_state_pre_hook(lambda _models, at: handle.load_state_dict(torch.load(f"{at}/{file}")))

    if args.resume:
        accelerator.load_state(args.resume)
    for images, labels in islice(batches, args.steps * args.accumulate):
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    if args.save:
        accelerator.save_state(args.save)
    return accelerator, model, handle, evaluate(accelerator, model, tests)


@torch.inference_mode()
def evaluate(accelerator: Accelerator, model: nn.Module, tests: DataLoader) -> float:
    """Accuracy on the test set in percent; each rank looks at its share."""
    right = [
        accelerator.gather_for_metrics(accelerator.unwrap_model(model)(images).argmax(1) == labels)
        for images, labels in tests
    ]
    return 100 * torch.cat(right).float().mean().item()


def loader(args: argparse.Namespace, part: str, batch: int) -> DataLoader:
    """Batches of one rank; prepare() gives each rank its share of the examples."""
    images = read_images(locate(args.data), part)
    examples = TensorDataset(*images.batch(torch.arange(len(images))))
    return DataLoader(examples, batch, shuffle=part == "train", drop_last=part == "train")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on Fashion-MNIST with Accelerate and thinwire.")
    parser.add_argument("--steps", type=int, default=400, help="default 400; an epoch has 468")
    parser.add_argument("--accumulate", type=int, default=2, help="passes whose gradients a step adds up (default 2)")
    parser.add_argument("--warmup", type=int, default=50, help="dense steps before compression starts (default 50)")
    parser.add_argument("--density", type=float, default=0.001, help="share of the entries sent (default 0.001)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint there, at the end")
    parser.add_argument("--resume", metavar="DIR", help="go on from the checkpoint there")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with Fashion-MNIST's four files")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    accelerator, _, handle, accuracy = train(parse_arguments())
    accelerator.print(f"test accuracy {accuracy:.2f} %")
    accelerator.print(handle.report())
    accelerator.end_training()
