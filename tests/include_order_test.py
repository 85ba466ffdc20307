"""include_order_test.py ROOT: the include order of the project holds.

error, types -> parameter, sparse_gradient -> residual | select | codec -> communicator -> sparse_all_reduce -> reducer
-> plan -> bindings, tools. A file may include what stands before it, never a neighbour of its own rank; the folders of
src/ stand where their public headers do. src/core may be used by everything in src/ and itself uses nothing later than
sparse_gradient.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

# Modules by rank: a module may include those of a lower rank and itself.
RANKS: list[list[str]] = [
    ["version", "error", "types", "trace"],
    ["parameter", "sparse_gradient"],
    ["core"],
    ["residual", "select", "codec"],
    ["communicator"],
    ["sparse_all_reduce"],
    ["reducer"],
    ["plan"],
    ["thinwire"],  # the table of contents: for users, bindings, tools, examples
    ["bindings", "tools"],
]
RANK = {module: rank for rank, modules in enumerate(RANKS) for module in modules}

# Folders of src/ whose name differs from the public header's.
FOLDERS = {"comm": "communicator", "all_reduce": "sparse_all_reduce"}

# (file, included header): reason. Exceptions are for people to argue about, so each has one.
ALLOWED: dict[tuple[str, str], str] = {}

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def module_of(path: Path) -> str:
    """The module that `path`, relative to the root, belongs to."""
    parts = path.parts
    if parts[0] in ("bindings", "tools"):
        return parts[0]
    if parts[0] == "include":
        return path.stem
    if len(parts) > 2:  # src/FOLDER/...
        return FOLDERS.get(parts[1], parts[1])
    return path.stem if path.stem in RANK else "reducer"  # src/types.cc; the rest of src/*.cc is the spine


def resolve(root: Path, file: Path, name: str) -> Path | None:
    """The project's file that `#include "name"` in `file` means, or None for somebody else's."""
    for folder in (file.parent, root / "src", root / "include", root):
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root)
    return None


def violations(root: Path) -> list[str]:
    root = root.resolve()
    found = []
    for top in ("include", "src", "bindings", "tools"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix in (".h", ".cc", ".cu", ".cuh"):
                found += violations_of(root, file)
    return found


def violations_of(root: Path, file: Path) -> list[str]:
    found = []
    here = file.relative_to(root)
    module = module_of(here)
    if module not in RANK:
        return [f"{here}: no place in the include order for '{module}'; add it to RANKS"]
    for quoted, angled in INCLUDE.findall(file.read_text(encoding="utf-8")):
        name = quoted or angled
        target = resolve(root, file, name)
        if target is None:
            if name.startswith("thinwire/"):
                found.append(f"{here}: includes {name}, which does not exist")
            elif here.parts[0] == "include" and (quoted or "/" in name or "." in name):
                found.append(f"{here}: a public header includes {name}, which is neither thinwire's nor the standard's")
            continue
        if (str(here), str(target)) in ALLOWED:
            continue
        other = module_of(target)
        if here.parts[0] == "include" and target.parts[0] != "include":
            found.append(f"{here}: a public header includes the internal {target}")
        elif other != module and RANK.get(other, len(RANKS)) >= RANK[module]:
            found.append(f"{here} ({module}) includes {target} ({other}), which does not stand before it")
    return found


def table_of_contents_is_short(root: Path) -> list[str]:
    lines = (root / "include/thinwire/thinwire.h").read_text(encoding="utf-8").splitlines()
    return [] if len(lines) < 40 else [f"include/thinwire/thinwire.h has {len(lines)} lines; it stays below 40"]


# What the checker must refuse, and what it must let pass: (file, its text, refused).
SELF_CHECK = [
    ("include/thinwire/codec.h", '#include "thinwire/select.h"', True),
    ("include/thinwire/types.h", '#include "thinwire/parameter.h"', True),
    ("include/thinwire/residual.h", '#include "core/hash.h"', True),
    ("include/thinwire/residual.h", "#include <hwy/highway.h>", True),
    ("include/thinwire/select.h", "#include <thinwire/reducer.h>", True),
    ("include/thinwire/reducer.h", '#include "thinwire/thinwire.h"', True),
    ("include/thinwire/reducer.h", '#include "thinwire/missing.h"', True),
    ("include/thinwire/reducer.h", '#include "thinwire/plan.h"', True),
    ("src/reducer.cc", '#include "thinwire/plan.h"', True),
    ("src/residual/residual.cc", '#include "select/select_kernels.h"', True),
    ("src/core/lane.cc", '  #  include "thinwire/codec.h"', True),
    ("src/codec/codec.cc", '#include "../select/select_kernels.h"', True),
    ("src/comm/thread_communicator.cc", '#include "thinwire/reducer.h"', True),
    ("src/nowhere/new.cc", "", True),
    ("include/thinwire/reducer.h", '#include <vector>\n#include "thinwire/codec.h"', False),
    ("src/select/select.cc", '#include "thinwire/select.h"\n#include "core/hash.h"\n#include <hwy/highway.h>', False),
    ("src/reducer.cc", '#include "thinwire/reducer.h"\n#include "select/select_kernels.h"', False),
    ("src/core/hash.cc", '#include "core/hash.h"\n#include "thinwire/sparse_gradient.h"', False),
    ("src/comm/thread_communicator.cc", '// #include "thinwire/reducer.h"', False),
    ("src/plan/cost_model.cc", '#include "thinwire/plan.h"\n#include "thinwire/reducer.h"', False),
    ("bindings/python/module.cc", '#include "thinwire/thinwire.h"', False),
]


def self_check() -> list[str]:
    wrong = []
    for name, text, refused in SELF_CHECK:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            headers = [f"include/thinwire/{m}.h" for rank in RANKS[:2] + RANKS[3:8] for m in rank]
            for empty in [*headers, "include/thinwire/thinwire.h", "src/core/hash.h", "src/select/select_kernels.h"]:
                (root / empty).parent.mkdir(parents=True, exist_ok=True)
                (root / empty).touch()
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
            if bool(violations(root)) != refused:
                wrong.append(f"self-check: {name} with {text!r} must {'be refused' if refused else 'pass'}")
    return wrong


def main() -> int:
    root = Path(sys.argv[1])
    found = self_check() + violations(root) + table_of_contents_is_short(root)
    print("\n".join(found) if found else "the include order holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
