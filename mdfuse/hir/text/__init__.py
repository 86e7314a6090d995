"""Host programs as text: what prints them, and what reads them back."""
