"""One client of a race: calls a function of an example for every input line.

    racer.py EXAMPLE.py FUNCTION URL ME

A line is a JSON array of further arguments; the answer is the function's result, as a line.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    path, name, url, me = sys.argv[1:]
    sys.path.insert(0, str(Path(path).parent))
    example = importlib.import_module(Path(path).stem)
    stream = importlib.import_module("streams").Stream(url)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        found = getattr(example, name)(stream, me, *json.loads(line))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
