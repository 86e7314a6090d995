"""What a run is given, and what it gives back."""
