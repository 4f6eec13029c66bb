from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# So that the tests run from a checkout, under any import mode, with nothing installed.
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
