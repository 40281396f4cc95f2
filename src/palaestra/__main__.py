"""`python -m palaestra` is the `palaestra` command."""

from palaestra.cli import main

if __name__ == "__main__":
    main()
