"""Fusion-to-fusion passes, one file each, in the order in which `hir_lowering.PASSES` runs them."""
