"""Embeddings with sparse (COO) gradients: reduced densely, given back as sparse tensors, the same as by plain DDP."""

import models
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer, SparseAdam

import thinwire.ddp

ROWS, WIDTH = 60, 8  # 480 elements: compressed, were the gradient not sparse
STEPS = 20


class Words(nn.Module):
    """Indices of rows [b, 4] -> [b, 1], by two tables with sparse gradients and a dense layer.

    No ReLU: it would give some rows gradients that are exactly zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.hidden = nn.Linear(WIDTH, 40)
        self.head = nn.Linear(40, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.table(x).mean(1) + self.bag(x)).tanh())


def rows_of(rank: int, generator: torch.Generator) -> Tensor:
    """Some rows are looked up by one rank only, some by two, some by none."""
    return torch.randint(15 * rank, 15 * rank + 20, (6, 4), generator=generator)


def optimizers(model: nn.Module, kind: str) -> list[Optimizer]:
    if kind == "sgd":
        return [SGD(model.parameters(), lr=0.05)]
    if kind == "momentum":
        return [SGD(model.parameters(), lr=0.05, momentum=0.9)]
    tables = [model.module.table.weight, model.module.bag.weight]
    rest = [*model.module.hidden.parameters(), *model.module.head.parameters()]
    return [SparseAdam(tables, lr=0.01), SGD(rest, lr=0.05, momentum=0.9)]


def without_compression(all_reduce: str) -> thinwire.ReducerOptions:
    if all_reduce == "dense":
        return thinwire.dense()
    options = thinwire.top_k(1.0)
    options.momentum_masking = False
    options.dense_below = 0
    return options


def train(rank: int, kind: str, options: thinwire.ReducerOptions | None, attached: range = range(0)) -> Tensor:
    """Parameters after STEPS steps, of which those in `attached` go through thinwire."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Words(), bucket_cap_mb=models.KB)
    several = optimizers(model, kind)
    generator = torch.Generator().manual_seed(rank)
    handle = None
    for step in range(STEPS):
        if step in attached and handle is None:
            handle = thinwire.ddp.attach(model, options, several[-1])
        if handle and step == attached.stop:
            handle.detach()
        for optimizer in several:
            optimizer.zero_grad()
        model(rows_of(rank, generator)).square().mean().backward()
        assert model.module.table.weight.grad.is_sparse
        for optimizer in several:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


KINDS = ("sgd", "momentum", "sparse_adam")
CASES = [(kind, how, at) for kind in KINDS for how, at in (("dense", range(STEPS)), ("all_gather", range(5, 15)))]


def differences(rank: int, world_size: int) -> dict[tuple[str, str, range], float]:
    plain = {kind: train(rank, kind, None) for kind in KINDS}
    result = {}
    for kind, how, attached in CASES:
        theta = train(rank, kind, without_compression(how), attached)
        result[kind, how, attached] = float((theta - plain[kind]).norm() / plain[kind].norm())
    return result


@pytest.fixture(scope="module", params=[2, 3])
def measured(request: pytest.FixtureRequest) -> dict[tuple[str, str, range], float]:
    return ranks.run(request.param, differences)[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_plain_ddp(measured: dict, case: tuple[str, str, range]) -> None:
    assert measured[case] <= 1e-6


class Table(nn.Module):
    """An embedding [20, 32]; the gradient of the rows x [n] is what a call gives for them, [n, 32]."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 32, sparse=True, dtype=dtype)

    def forward(self, x: Tensor, gradient: Tensor) -> Tensor:
        return (self.table(x) * gradient).sum()


def rows(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """pytorch#42400: a hook was given sparse gradients it could not read, and no word about who divides."""
    model = DistributedDataParallel(Table(dtype))
    handle = thinwire.ddp.attach(model, models.sparse(thinwire.top_k(0.01)))
    for step in range(4):
        model.zero_grad()
        x = torch.tensor([3, 3, 10 + rank])  # one row twice on every rank, one on this rank only
        model(x, torch.tensor([[1.0], [2.0], [4.0 * (rank + 1)]]).expand(3, 32).to(dtype)).backward()
        mean = model.module.table.weight.grad
        assert mean.is_sparse
        assert mean.dtype == dtype
        expected = torch.zeros(20, 32)
        expected[3] = 3.0
        for r in range(world_size):
            expected[10 + r] = 4.0 * (r + 1) / world_size
        assert torch.equal(mean.to_dense(), expected.to(dtype)), step
        assert mean.coalesce().indices().tolist() == [[3, *range(10, 10 + world_size)]]
    state = models.state_of(handle)
    assert not state["residual"]["table.weight"].any()
    assert handle.options.rules == (thinwire.ParameterRule("table.weight", dense=True),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_of_rows_is_divided_once(world_size: int, dtype: torch.dtype) -> None:
    ranks.run(world_size, rows, dtype)


def zero_rows(rank: int, world_size: int) -> None:
    """A row whose mean is zero is left out, so a step without any other row has an empty gradient."""
    model = DistributedDataParallel(Table())
    thinwire.ddp.attach(model, thinwire.dense())
    sign = 1.0 if rank == 0 else -1.0
    model(torch.tensor([5, 6]), torch.tensor([[sign], [0.0]]).expand(2, 32)).backward()
    assert model.module.table.weight.grad._nnz() == 0


def test_rows_with_the_mean_zero_are_left_out() -> None:
    ranks.run(2, zero_rows)


def compressed(rank: int, world_size: int, is_attached: bool) -> None:
    """Where a rule asks for it, or a hook state knows no module, a table is compressed like other parameters."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(Table())
    options = models.sparse(thinwire.top_k(0.01))
    if is_attached:
        options.rules = [thinwire.ParameterRule("table.*", dense=False)]
        handle = thinwire.ddp.attach(model, options)
    else:
        handle = thinwire.ddp.HookState(options, model.named_parameters())
        model.register_comm_hook(handle, thinwire.ddp.hook)
    given, received = torch.zeros(20, 32), torch.zeros(20, 32)
    for _ in range(5):
        model.zero_grad()
        x, gradient = torch.randint(20, (4,)), torch.randn(4, 32)
        model(x, gradient).backward()
        given.index_add_(0, x, gradient)
        received += world_size * model.module.table.weight.grad.to_dense()
    assert handle.stats().active
    residual = models.state_of(handle)["residual"]["table.weight"].view(20, 32)
    for tensor in (given, residual):
        dist.all_reduce(tensor)
    assert residual.any()
    torch.testing.assert_close(received + residual, given)

    model.zero_grad()
    model(torch.tensor([1]), torch.ones(1, 32)).backward()  # leaves a sparse gradient, which a flush replaces
    before = models.state_of(handle)["residual"]["table.weight"].view(20, 32)
    dist.all_reduce(before)
    handle.flush()
    assert model.module.table.weight.grad.is_sparse
    torch.testing.assert_close(model.module.table.weight.grad.to_dense(), before / world_size)


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_compressed_table_loses_nothing(is_attached: bool) -> None:
    ranks.run(2, compressed, is_attached)


def uneven(rank: int, world_size: int) -> list[float]:
    sums = []
    for attached in (False, True):
        torch.manual_seed(1)
        model = DistributedDataParallel(Words(), bucket_cap_mb=models.KB)
        optimizer = SGD(model.parameters(), lr=0.05)
        if attached:
            thinwire.ddp.attach(model, thinwire.dense(), optimizer)
        generator = torch.Generator().manual_seed(rank)
        with Join([model]):
            for _ in range(5 + 3 * rank):
                optimizer.zero_grad()
                model(rows_of(rank, generator)).square().mean().backward()
                optimizer.step()
        sums.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-7)


def test_uneven_inputs() -> None:
    ranks.run(2, uneven)


def unused(rank: int, world_size: int, attached: bool) -> str:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(10, 4, sparse=True) for _ in range(2))

        def forward(self, x: Tensor, which: int) -> Tensor:
            return self.tables[which](x)

    model = DistributedDataParallel(Either(), find_unused_parameters=True)
    if attached:
        thinwire.ddp.attach(model, thinwire.top_k(0.1))
    with pytest.raises(RuntimeError) as caught:
        model(torch.tensor([1, 2]), 0).sum().backward()
    return str(caught.value).splitlines()[0]


def test_what_ddp_says_about_an_unused_table_is_not_masked() -> None:
    """pytorch#80496: DDP itself has no sparse gradient for a table that a step does not use."""
    for attached in (False, True):
        for sentence in ranks.run(2, unused, attached):
            assert sentence.startswith("Expected sparse gradient to be defined")
