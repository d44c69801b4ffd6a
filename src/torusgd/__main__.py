"""`python -m torusgd` is the console script."""

from .cli import main

main()
