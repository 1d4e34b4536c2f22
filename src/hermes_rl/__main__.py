"""``python -m hermes_rl``: the command line."""

from hermes_rl.cli.main import main

if __name__ == "__main__":
    main()
