"""Host programs as text: the printer, and the parser that reads back what it prints."""
