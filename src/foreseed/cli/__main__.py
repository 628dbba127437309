"""`python -m foreseed.cli` is `foreseed`."""

import sys

from foreseed.cli import main

sys.exit(main())
