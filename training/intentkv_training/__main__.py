"""``python -m intentkv_training``: for ``accelerate launch -m``."""

import sys

from intentkv_training.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
