"""`python -m vocag_cli`: the `vocag` command where it is not installed."""

from vocag_cli import main

if __name__ == "__main__":
    main()
