"""`python -m selfspec`: the command line where no script is installed."""

import sys

from selfspec.cli import main

sys.exit(main())
