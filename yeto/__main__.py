"""``python -m yeto`` is ``yeto``."""

from yeto.cli.main import main

main()
