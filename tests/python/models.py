"""Small models and made-up data. Every tensor of 256 elements or more is compressed by `sparse`."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import thinwire.ddp

FEATURES = 32
KB = 1 / 1024  # of bucket_cap_mb


def sparse(options: thinwire.ReducerOptions) -> thinwire.ReducerOptions:
    """The same with a limit low enough for these models."""
    options.dense_below = 256
    return options


METHODS = {
    "top_k": lambda: sparse(thinwire.top_k(0.01)),
    "redsync": lambda: sparse(thinwire.redsync(0.01)),
    "dragonn": lambda: sparse(thinwire.dragonn(0.02)),
    "dragonn_a": lambda: sparse(thinwire.dragonn(0.02, "a")),
    "redsync_quantized": lambda: sparse(thinwire.redsync_quantized(0.01)),
    "threshold_search": lambda: sparse(thinwire.ReducerOptions(selector=thinwire.ThresholdSearch(0.02))),
    "dgc": lambda: sparse(thinwire.dgc(0.01)),
}


class Mlp(nn.Module):
    """[b, 32] -> [b, 1] through two hidden layers of 64, ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class MixedMlp(nn.Module):
    """f32, bf16 and f32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 64)
        self.middle = nn.Linear(64, 64).bfloat16()
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.first(x).relu().bfloat16())
        return self.head(hidden.relu().float())


class Branches(nn.Module):
    """A trunk, and branches of which a call uses one; `never` takes no part at all."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.never = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.head(self.branches[branch](self.trunk(x).relu()).relu())


class GivenGradients(nn.Module):
    """Parameters w0, w1, … of the given shapes, used in this order. The gradient of each is what a call gives."""

    def __init__(self, *shapes: tuple[int, ...], dtypes: Sequence[torch.dtype] = (torch.float32,)) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)])))

    def forward(self, *gradients: Tensor) -> Tensor:
        products = [(p * g).sum().float() for p, g in zip(self.parameters(), gradients, strict=True)]
        return torch.stack(products).sum()


class Batches:
    """An endless regression task: y = sin of a fixed linear form of x, other x for every rank."""

    def __init__(self, rank: int, size: int = 16) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self._weights = torch.linspace(-1, 1, FEATURES)

    def __call__(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(self._size, FEATURES, generator=self._generator)
        return x, torch.sin(0.3 * x @ self._weights).unsqueeze(1)


def state_of(handle: thinwire.ddp.Handle) -> dict:
    """What stands in this rank's state, without its keys."""
    state = handle.state_dict()
    while "version" not in state:
        (state,) = state.values()
    return state


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], *args: int) -> Tensor:
    """Mean squared error of the model on one batch."""
    return mse_loss(model(batch[0], *args), batch[1])


def checksum(tensors: list[Tensor]) -> int:
    """Of all bits."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().flatten().view(torch.uint8).numpy().tobytes(), value)
    return value
