"""``python -m dsops_prebuilt``: the ``dsops`` command."""

from __future__ import annotations

import sys

from dsops_prebuilt.cli import main

if __name__ == "__main__":
    sys.exit(main())
