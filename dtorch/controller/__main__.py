"""``python -m dtorch.controller``: started by ``dtorch.client.engine``, not by hand."""

import sys

from dtorch.controller.process import main

main(sys.argv[1:])
