"""`python -m steps ...`, see `steps.cli.main`."""

import sys

from steps.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
