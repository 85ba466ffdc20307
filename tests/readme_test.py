"""README quotes examples/quickstart.cc word for word, and names no file that is not there."""

import re
import sys
from pathlib import Path


def problems(readme: str, root: Path) -> list[str]:
    """What is wrong with the text of a README, in words."""
    found = []
    program = (root / "examples" / "quickstart.cc").read_text(encoding="utf-8")
    if f"```cpp\n{program}```" not in readme:
        found.append("README.md does not quote examples/quickstart.cc as it is")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        if not (root / target).exists():
            found.append(f"README.md links to {target}, which is not there")
    return found


def main() -> int:
    root = Path(sys.argv[1])
    readme = (root / "README.md").read_text(encoding="utf-8")
    broken = readme.replace("kRanks = 4", "kRanks = 5") + "[x](no/such/file)"
    if len(problems(broken, root)) != 2:
        print("the check itself is broken: it accepts a changed quotation or a dead link")
        return 1
    found = problems(readme, root)
    print("\n".join(found) or "README: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
