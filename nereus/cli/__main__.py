"""`python -m nereus.cli` is the `nereus` script."""

from nereus.cli import main

if __name__ == "__main__":
    main()
