"""`python -m triptych`, the same as `triptych`."""

import sys

from triptych import main

sys.exit(main())
