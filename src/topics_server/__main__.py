"""`python -m topics_server VERB …`: the same as the console script `topics`."""

from __future__ import annotations

from topics_server.cli import main

if __name__ == "__main__":
    main()
