"""The command line: `evolute report`, `plot`, `verify`, `bench`, `info`.

Exit codes: 0 all is well, 1 a statement fails, 2 the command cannot do what was asked, 130 stopped by Ctrl-C. A new
command is one file here with a function of its name, and one word in `commands.COMMANDS`.
"""

from evolute.cli.run import main

__all__ = ["main"]
