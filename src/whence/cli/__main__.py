"""`python -m whence.cli` is `whence`."""

import sys

from whence.cli import main

sys.exit(main())
