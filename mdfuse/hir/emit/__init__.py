"""Emit the host program: from the fusion after its passes to host instructions."""
