"""`python -m whence`: the command line."""

from whence.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
