"""What the training scripts share: methods by name, the command line, and running one method after the other."""

import argparse
import json
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training_record import Record, gather

import thinwire
import thinwire.ddp

TIMEOUT = timedelta(minutes=2)  # for a rank that has stalled
EVALUATIONS = 6  # during a run, the last one at its end

# By name: the options for a density, given the patterns of the output layer's parameters.
METHODS: dict[str, Callable[[float, Sequence[str]], thinwire.ReducerOptions]] = {
    "top_k": lambda density, _: thinwire.top_k(density),
    "redsync": lambda density, _: thinwire.redsync(density),
    "redsync_quantized": lambda density, output: thinwire.redsync_quantized(density, output_layer=output),
    "redsync_quantized_paper_rule": lambda density, output: paper_rule(density, output),
    "dragonn": lambda density, _: thinwire.dragonn(density),
    "dragonn_a": lambda density, _: thinwire.dragonn(density, layout="a"),
    "dgc": lambda density, _: thinwire.dgc(density),
}
CONTROL = "no error feedback"  # top-k of the local gradient; what is not sent is lost


def paper_rule(density: float, output_layer: Sequence[str]) -> thinwire.ReducerOptions:
    """RedSync's quantization as its code does it: what the mean does not say is dropped."""
    options = thinwire.redsync_quantized(density, output_layer=output_layer)
    options.rounding_feedback = False
    return options


def compression(
    method: str, density: float, dense_steps: int, seed: int, output_layer: Sequence[str] = (), clip_norm: float = 0.0
) -> thinwire.ReducerOptions:
    """The options of a method, by its name here.

    output_layer: patterns of the parameters that RedSync does not quantize. clip_norm: as for dense training, of the
    mean; 0 for none.
    """
    if method == CONTROL:  # the optimizer keeps its momentum
        options = thinwire.top_k(density)
        options.error_feedback = False
        options.unit = "parameter"
    else:
        options = METHODS[method](density, output_layer)
    options.schedule = thinwire.Schedule(dense_steps=dense_steps)
    options.seed = seed
    options.clip_norm = clip_norm
    return options


def evaluation_steps(steps: int, evaluations: int = EVALUATIONS) -> set[int]:
    """Numbers of steps done after which to evaluate."""
    return {round(steps * i / evaluations) for i in range(1, evaluations + 1)}


def result(method: str, args: argparse.Namespace, model: nn.Module, record: Record, **more: Any) -> dict:
    """What was measured, as it is written; every rank calls it. Fails if the ranks hold different parameters."""
    checksum = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    if len(set(gather(checksum))) != 1:
        raise RuntimeError(f"{method}: the ranks hold different parameters after {record.steps} steps")
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "method": method,
        "density": 1.0 if method == "dense" else args.density,
        "ranks": dist.get_world_size(),
        "seed": args.seed,
        "parameters": parameters,
        "steps": record.steps,
        "dense_steps": record.steps if method == "dense" else args.warmup,
        **more,
        **record.summary(parameters),
    }


def parser_of(description: str, density: float) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts have."""
    parser = argparse.ArgumentParser(description=description + "; start it with torchrun.")
    methods = ["dense", *METHODS, CONTROL]
    parser.add_argument(
        "--method",
        nargs="+",
        choices=methods,
        default=["redsync"],
        metavar="METHOD",
        help="one or several of: " + ", ".join(methods),
    )
    parser.add_argument(
        "--density", type=float, default=density, help=f"share of the entries sent (default {density:g})"
    )
    parser.add_argument("--seed", type=int, default=1, help="of weights, order of examples and hashing (default 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results there, as JSON")
    parser.add_argument("--smoke", action="store_true", help="a few dozen steps on a small part of the data")
    return parser


def run_methods(args: argparse.Namespace, train: Callable[[str], dict]) -> None:
    """Trains with each method in turn; rank 0 prints and writes the results."""
    results = []
    for method in args.method:
        run = train(method)
        results.append(run)
        if dist.get_rank() == 0:
            metric = "accuracy" if "test_accuracy" in run else "perplexity"
            unit = " %" if metric == "accuracy" else ""
            print(
                f"{method}: test {metric} {run[f'test_{metric}']:.2f}{unit}, "
                f"{run['bytes_sent_per_step'] / 1e3:.1f} kB sent per step and rank "
                f"(dense {run['dense_bytes_per_step'] / 1e3:.1f} kB), {run['train_seconds']:.0f} s",
                flush=True,
            )
    if dist.get_rank() == 0 and args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1))


def start(args: argparse.Namespace, run: Callable[[argparse.Namespace], None], *errors: type[Exception]) -> None:
    """Connects the ranks and runs. Of `errors`, thinwire's own and ValueError the message alone is shown."""
    if "RANK" not in os.environ:
        sys.exit(f"Start it with torchrun, for instance: torchrun --nproc-per-node 4 examples/{Path(sys.argv[0]).name}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        run(args)
    except (*errors, thinwire.Error, ValueError) as error:
        sys.exit(f"rank {dist.get_rank()}: {error}")
    finally:
        dist.destroy_process_group()
