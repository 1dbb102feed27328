"""`python -m vocag`: the `vocag` command where it is not installed."""

from vocag.command import main

if __name__ == "__main__":
    main()
