"""``python -m intentkv``: the same as the ``intentkv`` command."""

from intentkv.cli import main

if __name__ == "__main__":
    main()
