"""``python -m lowbit`` is ``lowbit``: the command line, and a Ctrl-C while its imports go on."""

import sys


def main() -> None:
    """Run the command line; what it imports takes longer than it takes to think better of it."""
    try:
        from lowbit.cli import main as run

        run()
    except KeyboardInterrupt:
        print("lowbit: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
