"""``python -m convexformer``: the command line."""

from convexformer.cli import main

if __name__ == "__main__":
    main()
