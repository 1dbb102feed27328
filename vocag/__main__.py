"""`python -m vocag`: the `vocag` command, even if not installed."""

from vocag.command import main

if __name__ == "__main__":
    main()
