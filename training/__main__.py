"""`python -m selfspec.training`: the same as `selfspec train`."""

import sys

from selfspec.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
