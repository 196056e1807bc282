"""`python -m jvlab` is the `jvlab` command."""

from jvlab._cli import main

if __name__ == "__main__":
    raise SystemExit(main())
