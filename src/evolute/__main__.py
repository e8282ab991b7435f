"""`python -m evolute` is `evolute`."""

from evolute.cli import main

if __name__ == "__main__":
    main()
