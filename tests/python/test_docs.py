"""Every Python snippet of README.md and docs/*.md runs, and every message that they quote is one of thinwire's.

The line that opens a snippet says where it runs: ```` ```python ranks=2 ```` on that many ranks, connected by Gloo and
with torchrun's environment variables, all of them in one empty folder; ```` ```python ranks=0 ```` without any, and
```` ```python ranks=2,3 ```` on two and then, in the same folder, on three. Each is a program of its own, after
PRELUDE.
"""

import ast
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks

for _name in ("lightning.pytorch", "accelerate"):  # once, before the ranks are forked
    pytest.importorskip(_name)

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What docs/pytorch.md says that snippets take for granted.
PRELUDE = """
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import thinwire
import thinwire.ddp

torch.manual_seed(1)
rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
network = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.functional.cross_entropy
loader = DataLoader(TensorDataset(torch.randn(64, 512), torch.randint(10, (64,))), batch_size=8)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network

    def training_step(self, batch):
        return loss_fn(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


module = Module()
"""


def snippets() -> list[SimpleNamespace]:
    """All of them: where they stand, the word after ```python, and the code."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```py(?:thon)?(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
            line = text[: match.start()].count("\n") + 1
            where = f"{page.relative_to(ROOT)}:{line}"
            found.append(SimpleNamespace(where=where, kind=match[1].strip(), code=match[2], line=line, page=page))
    return found


SNIPPETS = snippets()


def compiled(snippet: SimpleNamespace) -> object:
    """With the line numbers of its page, for tracebacks."""
    return compile("\n" * snippet.line + snippet.code, snippet.page.name, "exec")


def execute(rank: int, world_size: int, snippet: SimpleNamespace, folder: Path) -> None:
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "docs"}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: the process group exists
    names: dict[str, object] = {"__name__": "__main__"}
    exec(PRELUDE, names)
    exec(compiled(snippet), names)
    if "attach(" in snippet.code and "backward" not in snippet.code:  # the user's loop follows
        model, optimizer = names.get("model", names["network"]), names["optimizer"]
        for x, y in names["loader"]:
            optimizer.zero_grad()
            names["loss_fn"](model(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.where)
def test_snippet(snippet: SimpleNamespace, tmp_path: Path) -> None:
    match = re.fullmatch(r"ranks=(\d(?:,\d)*)", snippet.kind)
    assert match, f"{snippet.where} does not say where it runs: open it with ```python ranks=2"
    for count in map(int, match[1].split(",")):
        if count == 0:
            exec(PRELUDE, names := {})
            exec(compiled(snippet), names)
        else:
            ranks.run(count, execute, snippet, tmp_path)


def sentences() -> set[str]:
    """The texts in thinwire's sources, cut where something is filled in."""
    found = set()
    for path in (ROOT / "bindings" / "python" / "thinwire").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(" ".join(node.value.split()))
    for path in [*(ROOT / "src").rglob("*.cc"), *(ROOT / "bindings").rglob("*.cc")]:
        joined = re.sub(r'"\s*\n\s*"', "", path.read_text(encoding="utf-8"))
        found.update(re.findall(r'"((?:[^"\\\n]|\\.)*)"', joined))
    return found


def quotations() -> list[tuple[str, str]]:
    """What stands in “ ” on a page, cut at each …"""
    return [
        (page.name, part.strip())
        for page in PAGES
        for quotation in re.findall(r"“([^”]+)”", page.read_text(encoding="utf-8"))
        for part in quotation.split("…")
        if part.strip()
    ]


def test_quoted_messages_are_those_of_the_code() -> None:
    texts = sentences()
    assert len(quotations()) > 20
    wrong = [(page, part) for page, part in quotations() if not any(part in text for text in texts)]
    assert not wrong
