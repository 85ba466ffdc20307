"""silence_test.py NM LIBRARY: the library prints nothing and never ends the process.

Reads the undefined symbols of the static library's objects. Its errors are exceptions, its output is the caller's.
"""

from __future__ import annotations

import re
import subprocess
import sys

FORBIDDEN = re.compile(
    r"""^(
      (__)?v?(f|d)?printf(_chk)? | f?puts | f?putc | putchar | fwrite | perror | write | stdout | stderr
    | abort | _?exit | _Exit | quick_exit | __assert_fail | raise | signal
    | std::(cout|cerr|clog|wcout|wcerr|wclog|ios_base::Init::.*|print.*|abort|exit)
    | hwy::Abort\(.*
    )$""",
    re.VERBOSE,
)


def forbidden(nm_output: str) -> list[str]:
    """`object: symbol` for each forbidden symbol of `nm -C --undefined-only`."""
    found, object_name = [], "?"
    for line in nm_output.splitlines():
        if line.endswith(":"):
            object_name = line[:-1]
        elif (match := re.match(r"^\s*[Uw]\s+(.*?)(@.*)?$", line)) and FORBIDDEN.match(match[1]):
            found.append(f"{object_name}: {match[1]}")
    return found


def self_check() -> list[str]:
    bad = ["printf", "__fprintf_chk", "puts", "abort", "exit", "std::cout", "std::ios_base::Init::Init()", "stderr"]
    good = ["snprintf", "std::terminate()", "operator new(unsigned long)", "memcpy", "my::abort_step()", "vsnprintf"]
    wrong = [f"self-check: {name} was not found" for name in bad if not forbidden(f"a.o:\n   U {name}\n")]
    return wrong + [f"self-check: {name} is harmless" for name in good if forbidden(f"a.o:\n   U {name}\n")]


def main() -> int:
    nm, library = sys.argv[1:]
    output = subprocess.run([nm, "-C", "--undefined-only", library], check=True, capture_output=True, text=True).stdout
    found = self_check() + forbidden(output)
    print("\n".join(found) if found else "the library prints nothing and never aborts")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
