"""Trains a word language model on the King James Bible under DistributedDataParallel, with and without thinwire.

    torchrun --nproc-per-node 4 examples/word_lm.py --method redsync --density 0.01 --seed 1 --out run.json
    torchrun --nproc-per-node 4 examples/word_lm.py --vocabulary 10000 --width 1500    # the papers' shape; slow on CPU

A tied embedding and an LSTM of two layers. The text is cut into 20 streams that the ranks share; a step reads 20 words
of each and hands the hidden state on. Ranks are processes on CPU, one thread each, connected by Gloo.
"""

import argparse
import math

import king_james_data
import numpy as np
import torch
import torch.distributed as dist
import training
from king_james_data import TextError
from progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.parallel import DistributedDataParallel
from training_record import Record

import thinwire.ddp

STREAMS = 20  # of all ranks together
WORDS = 20  # of each stream in a step
LEARNING_RATE = 20.0
WARMUP = 50  # steps, of the learning rate
CLIP_NORM = 0.25
OUTPUT_LAYER = ["embedding.weight", "bias"]
State = tuple[Tensor, Tensor]  # of the LSTM, each [2, streams, width]


class WordModel(nn.Module):
    """Embedding, LSTM of two layers, and the embedding once more as the output layer."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Words [t, b] i64: scores of each one's successor [t, b, vocabulary], and the state behind the last one."""
        hidden, state = self.lstm(self.embedding(words), state)
        return linear(hidden, self.embedding.weight, self.bias), state


class Streams:
    """A text cut into adjoining streams of one length, columns of [length, streams] i64."""

    def __init__(self, tokens: np.ndarray, streams: int = STREAMS) -> None:
        length = len(tokens) // streams
        self._words = torch.from_numpy(tokens[: length * streams]).reshape(streams, length).t().contiguous()
        self.windows = (length - 1) // WORDS  # steps until they begin anew

    def window(self, step: int, share: slice) -> tuple[Tensor, Tensor]:
        """Words [WORDS, b] of a share of the streams, and their successors."""
        begin = step % self.windows * WORDS
        words = self._words[begin : begin + WORDS + 1, share]
        return words[:-1], words[1:]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over words and streams of the negative log-likelihood."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def rate_factor(step: int, steps: int, warmup: int = WARMUP) -> float:
    """What the learning rate is multiplied by: up in `warmup` steps, flat to half of the steps, then down to 0."""
    return min((step + 1) / warmup, 1.0, (steps - step) / (steps - steps // 2))


def share_of(rank: int, ranks: int) -> slice:
    """The streams of a rank."""
    return slice(rank * STREAMS // ranks, (rank + 1) * STREAMS // ranks)


def train(method: str, args: argparse.Namespace, text: Streams, test_text: Streams) -> dict:
    """Trains one model with one method and returns what was measured. Every rank calls it."""
    rank, share = dist.get_rank(), share_of(dist.get_rank(), dist.get_world_size())
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(WordModel(args.vocabulary, args.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    handle = None
    if method != "dense":
        options = training.compression(method, args.density, args.warmup, args.seed, OUTPUT_LAYER, CLIP_NORM)
        handle = thinwire.ddp.attach(model, options, optimizer, timeout=training.TIMEOUT)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, args.steps))
    evaluate_after = training.evaluation_steps(args.steps)
    record = Record(args.steps, "perplexity")
    progress = Progress(method, args.steps)
    state: State | None = None
    for step in range(args.steps):
        words, targets = text.window(step, share)
        record.begin_step()
        optimizer.zero_grad()
        scores, state = model(words, state)
        loss = loss_of(scores, targets)
        loss.backward()
        state = (state[0].detach(), state[1].detach())
        if handle is None:  # thinwire clips what each rank puts in; dense training clips the mean
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        record.end_step(step, loss, handle.stats() if handle else None)
        schedule.step()
        if step + 1 in evaluate_after:
            record.evaluations.append((step + 1, evaluate(model.module, test_text)))
        if rank == 0:
            perplexity = f"perplexity {record.evaluations[-1][1]:.1f}" if record.evaluations else ""
            progress.update(step + 1, f"loss {loss.item():.3f}  {perplexity}")

    more = {"vocabulary": args.vocabulary, "width": args.width}
    measured = training.result(method, args, model, record, **more)
    if handle:
        handle.detach()
    return measured


def evaluate(model: WordModel, text: Streams) -> float:
    """Perplexity; each rank reads its share of the streams."""
    share = share_of(dist.get_rank(), dist.get_world_size())
    sums = torch.tensor([total_loss(model, text, share), (share.stop - share.start) * text.windows * WORDS])
    dist.all_reduce(sums)
    return math.exp(sums[0].item() / sums[1].item())


@torch.inference_mode()
def total_loss(model: WordModel, text: Streams, share: slice) -> float:
    """Sum of the negative log-likelihoods of a share of the streams, read once from their beginning."""
    total, state = 0.0, None
    for window in range(text.windows):
        words, targets = text.window(window, share)
        scores, state = model(words, state)
        total += loss_of(scores, targets).item() * targets.numel()
    return total


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = training.parser_of("Train a word language model on the King James Bible", density=0.01)
    parser.add_argument("--steps", type=int, default=800, help="default 800")
    parser.add_argument(
        "--warmup", type=int, default=100, metavar="STEPS", help="dense steps before compression starts (default 100)"
    )
    parser.add_argument("--vocabulary", type=int, default=4000, metavar="WORDS", help="default 4000")
    parser.add_argument("--width", type=int, default=128, help="units of the embedding and each layer (default 128)")
    return parser.parse_args()


def run(args: argparse.Namespace) -> None:
    """Trains with each method in turn."""
    if args.smoke:
        args.steps, args.warmup = min(args.steps, 30), min(args.warmup, 10)
    if STREAMS % dist.get_world_size() != 0:
        raise ValueError(f"{STREAMS} streams cannot be shared evenly by {dist.get_world_size()} ranks")
    for name in ("steps", "width"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be above 0")
    if args.vocabulary < 2:
        raise ValueError(f"--vocabulary {args.vocabulary} must be above 1")
    corpus = king_james_data.load(args.vocabulary)
    args.vocabulary = len(corpus.words)
    test = corpus.test[: STREAMS * (5 * WORDS + 1)] if args.smoke else corpus.test
    training.run_methods(args, lambda method: train(method, args, Streams(corpus.train), Streams(test)))


if __name__ == "__main__":
    training.start(parse_arguments(), run, TextError)
