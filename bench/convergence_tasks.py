"""What is trained: the tasks, and one training run of a job."""

import functools
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch
from convergence_report import CONTROL, NO_WARM_UP, SMALL_SPARSE, SWITCH
from convergence_workers import FlatModel, Workers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import fashion_mnist
import fashion_mnist_data
import king_james_data
import training
import word_lm

import thinwire

EPOCHS = {"T1s": 3, "T1": 3, "T3": 1}  # T3 takes six times as long as T1
EVALUATIONS = {"T3": 2, "T2": 4}  # during a run, the last one at its end; training.EVALUATIONS of the others
DENSE_STEPS = 100  # at the beginning of a run
CHECK_EVERY = 100  # steps: nothing lost, and the same means on all workers
LAST_DENSE = 200  # steps at the end of a run that switches back
QUICK_STEPS, QUICK_DENSE, QUICK_CHECK, QUICK_LAST = 30, 10, 5, 10


@dataclass(frozen=True)
class Job:
    """One training run."""

    task: str
    method: str  # of training.METHODS, or "dense"
    density: float  # 1 for dense
    ranks: int  # workers; 1 for dense: the mean over workers is that over the batch
    seed: int
    variant: str = ""  # CONTROL and what else convergence_report names

    def name(self) -> str:
        """For files."""
        words = (self.task, self.method, f"{self.density:g}", f"{self.ranks}w", f"seed{self.seed}", self.variant)
        return "-".join(word.replace(" ", "_") for word in words if word)

    def words(self) -> str:
        """For people."""
        density = "" if self.method == "dense" else f" {100 * self.density:g} %, {self.ranks} workers"
        return f"{self.task} {self.method}{density}, seed {self.seed}" + (f", {self.variant}" if self.variant else "")


class ImageTask:
    """A CNN on Fashion-MNIST; metric: accuracy on the test set in percent."""

    metric = "test accuracy"
    momentum, learning_rate, clip_norm = fashion_mnist.MOMENTUM, fashion_mnist.LEARNING_RATE, 0.0

    def __init__(self, name: str, seed: int, quick: bool) -> None:
        train_set, self._test_set = _images(quick)
        self.model = fashion_mnist.network(name)
        self._order = fashion_mnist.example_order(len(train_set), 1 if quick else EPOCHS[name], seed)
        self._train_set = train_set
        self.steps = len(self._order)
        self.dense_steps = QUICK_DENSE if quick else DENSE_STEPS
        self.output_layer = [f"{len(self.model) - 1}.*"]

    def rate_factor(self, step: int) -> float:
        """Of the learning rate."""
        return fashion_mnist.rate_factor(step, self.steps, self.dense_steps)

    def losses(self, step: int, workers: int) -> Iterator[Tensor]:
        """Each worker's loss on its share of the step's batch."""
        for share in self._order[step].chunk(workers):
            images, labels = self._train_set.batch(share)
            yield cross_entropy(self.model(images), labels)

    @torch.inference_mode()
    def evaluate(self) -> float:
        """The metric."""
        indices = torch.arange(len(self._test_set))
        return 100 * fashion_mnist.count_correct(self.model, self._test_set, indices).item() / len(indices)


class WordTask:
    """An LSTM on the King James text; metric: perplexity of the validation part."""

    metric = "validation perplexity"
    momentum, learning_rate, clip_norm = 0.0, word_lm.LEARNING_RATE, word_lm.CLIP_NORM
    output_layer = word_lm.OUTPUT_LAYER

    def __init__(self, name: str, seed: int, quick: bool) -> None:
        del name, seed  # the seed is that of the weights, and set already
        corpus = _corpus(4000)
        self._text = word_lm.Streams(corpus.train)
        self._valid = word_lm.Streams(corpus.valid[:2100] if quick else corpus.valid)
        self.model = word_lm.WordModel(4000, 128)
        self.steps = QUICK_STEPS if quick else 800
        self.dense_steps = QUICK_DENSE if quick else DENSE_STEPS
        self._states: dict[int, word_lm.State] = {}

    def rate_factor(self, step: int) -> float:
        """Of the learning rate."""
        return word_lm.rate_factor(step, self.steps)

    def losses(self, step: int, workers: int) -> Iterator[Tensor]:
        """Each worker's loss on its streams; each has a hidden state of its own."""
        for worker in range(workers):
            words, targets = self._text.window(step, word_lm.share_of(worker, workers))
            scores, (h, c) = self.model(words, self._states.get(worker))
            self._states[worker] = (h.detach(), c.detach())
            yield word_lm.loss_of(scores, targets)

    def evaluate(self) -> float:
        """The metric."""
        total = word_lm.total_loss(self.model, self._valid, slice(None))
        return math.exp(total / (self._valid.windows * word_lm.WORDS * word_lm.STREAMS))


Task = ImageTask | WordTask
TASKS: dict[str, type[ImageTask] | type[WordTask]] = {
    "T1s": ImageTask,
    "T2": WordTask,
    "T1": ImageTask,
    "T3": ImageTask,
}


@functools.lru_cache
def _images(quick: bool) -> tuple[fashion_mnist.Images, fashion_mnist.Images]:
    folder = fashion_mnist_data.locate()
    train_set, test_set = (fashion_mnist.read_images(folder, part) for part in ("train", "test"))
    if quick:
        return train_set.first(QUICK_STEPS * fashion_mnist.BATCH), test_set.first(500)
    return train_set, test_set


@functools.lru_cache
def _corpus(size: int) -> king_james_data.Corpus:
    return king_james_data.load(size)


def options_of(job: Job, task: Task) -> thinwire.ReducerOptions:
    """How the job's workers reduce."""
    method = training.CONTROL if job.variant == CONTROL else job.method
    dense_steps = 0 if job.variant == NO_WARM_UP else task.dense_steps
    options = training.compression(method, job.density, dense_steps, job.seed, task.output_layer, task.clip_norm)
    if job.variant == CONTROL:
        options.unit = training.METHODS[job.method](job.density, task.output_layer).unit
    elif task.momentum:
        options.momentum = task.momentum
    if job.variant == SMALL_SPARSE:
        options.dense_below = 1024
    return options


def run(job: Job, quick: bool = False) -> dict:
    """Trains and returns what was measured.

    Errors: ConservationError; thinwire.Error; DatasetError and TextError in one sentence.
    """
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    begin, cpu = time.perf_counter(), time.process_time()
    task = TASKS[job.task](job.task, job.seed, quick)
    flat = FlatModel(task.model)
    measured = _train_dense(job, task, flat) if job.method == "dense" else _train_workers(job, task, flat, quick)
    return {
        **asdict(job),
        "metric": task.metric,
        "value": measured["metric_curve"][-1][1],
        "steps": task.steps,
        "parameters": len(flat.flat),
        "dense_bytes_per_step": 2 * (job.ranks - 1) / job.ranks * 4 * len(flat.flat),
        **measured,
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def _train_dense(job: Job, task: Task, flat: FlatModel) -> dict:
    """Plain SGD over the whole batch."""
    optimizer = torch.optim.SGD([flat.flat], lr=task.learning_rate, momentum=task.momentum)
    flat.flat.grad = torch.zeros_like(flat.flat)
    views = flat.views(flat.flat.grad)
    losses, evaluations = [], []
    evaluate_after = training.evaluation_steps(task.steps, EVALUATIONS.get(job.task, training.EVALUATIONS))
    for step in range(task.steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate * task.rate_factor(step)
        (loss,) = task.losses(step, 1)
        torch._foreach_copy_(views, torch.autograd.grad(loss, flat.parameters))
        if task.clip_norm:
            nn.utils.clip_grad_norm_([flat.flat], task.clip_norm)
        optimizer.step()
        losses.append(round(loss.item(), 5))
        if step + 1 in evaluate_after:
            evaluations.append([step + 1, round(task.evaluate(), 4)])
    return {"losses": losses, "metric_curve": evaluations, "bytes_sent_per_step": None, "density_sent": 1.0}


def _train_workers(job: Job, task: Task, flat: FlatModel, quick: bool) -> dict:
    """SGD on the means that P workers' reducers make; momentum is theirs, but for the control."""
    workers = Workers(options_of(job, task), flat.places, job.ranks)
    momentum = task.momentum if job.variant == CONTROL else 0.0
    optimizer = torch.optim.SGD([flat.flat], lr=task.learning_rate, momentum=momentum)
    gradients = torch.empty(job.ranks, len(flat.flat))
    flat.flat.grad = gradients[0]
    views = [flat.views(row) for row in gradients]
    losses, evaluations, sent, density = [], [], [], []
    evaluate_after = training.evaluation_steps(task.steps, EVALUATIONS.get(job.task, training.EVALUATIONS))
    last_dense = (QUICK_LAST if quick else LAST_DENSE) if job.variant == SWITCH else 0
    check_every = QUICK_CHECK if quick else CHECK_EVERY
    for step in range(task.steps):
        optimizer.param_groups[0]["lr"] = task.learning_rate * task.rate_factor(step)
        shares = []
        for row, loss in zip(views, task.losses(step, job.ranks), strict=True):
            torch._foreach_copy_(row, torch.autograd.grad(loss, flat.parameters))
            shares.append(loss.item())
        mode = "dense" if step >= task.steps - last_dense else "scheduled"
        check = (step + 1) % check_every == 0 or step == task.dense_steps
        stats = workers.reduce(gradients, mode, check)
        optimizer.step()
        losses.append(round(fmean(shares), 5))
        if stats[0].active:
            sent.append(fmean(one.bytes_sent for one in stats))
            density.append(fmean(one.density for one in stats))
        if step + 1 in evaluate_after:
            evaluations.append([step + 1, round(task.evaluate(), 4)])
    if job.variant != CONTROL:
        workers.flush(len(flat.flat))
    workers.close()
    return {
        "losses": losses,
        "metric_curve": evaluations,
        "bytes_sent_per_step": round(fmean(sent), 1),
        "density_sent": round(fmean(density), 7),
        **({"switched_after": [task.dense_steps, task.steps - last_dense]} if job.variant == SWITCH else {}),
    }
