"""`python -m selfspec.training`: the trainer's command line."""

import sys

from selfspec.training.trainer import main

sys.exit(main())
