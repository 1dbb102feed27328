"""`python -m vocag`: the `vocag` command, not installed."""

from vocag.command import main

if __name__ == "__main__":
    main()
