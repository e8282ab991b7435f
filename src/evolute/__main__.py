"""`python -m evolute` is `evolute`."""

from evolute.cli import main

main()
