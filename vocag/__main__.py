"""`python -m vocag`: the `vocag` command if it is not installed."""

from vocag.command import main

if __name__ == "__main__":
    main()
