"""The commands behind ``softfree COMMAND``: one module each, with ``main(argv) -> exit code``."""
