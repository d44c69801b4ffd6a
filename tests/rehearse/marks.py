"""Which tests need the network lab: skipped with a reason where it can't be, but never as root in CI."""

import os

import pytest

from torusgd.rehearse.wire import why_not

MISSING = why_not()
needs_lab = pytest.mark.skipif(
    MISSING is not None and not (os.environ.get("CI") == "true" and os.geteuid() == 0), reason=str(MISSING)
)
