"""`python -m bigbatch_lint`."""

import sys

from bigbatch_lint.cli import main

sys.exit(main())
