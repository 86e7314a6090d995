"""The command line: it parses, calls the library, and renders with rich."""
