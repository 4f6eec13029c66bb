"""``python -m dsops_builder``."""

from dsops_builder.cli import main

if __name__ == "__main__":
    main()
