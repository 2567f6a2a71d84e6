"""``python -m softfree``: the same as the ``softfree`` command."""

import sys

from softfree_cli import main

sys.exit(main())
