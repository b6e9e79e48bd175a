"""`python -m whence.demo` is `whence demo`."""

import sys

from whence.demo import main

sys.exit(main())
