"""The command line, which parses arguments, calls the library, and prints with rich."""
