"""`python -m slurmdl`: the same as the program `slurmdl`."""

import sys

from slurmdl.cli.main import main

sys.exit(main())
