"""``python -m colocate_rl``: the console script, also without an installation."""

from colocate_rl.cli import main

main()
