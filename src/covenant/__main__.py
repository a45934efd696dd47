"""`python -m covenant` is the program `covenant`."""

from covenant.cli.main import main

main()
