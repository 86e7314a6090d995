"""One program for every number of ranks: leaves that ranks compute, and sums in a fixed tree.

With `Options.same_bits` a definition is lowered on a mesh of 8 leaves along each axis. So all that
decides on bits (shapes of kernels, terms of sums, choices of passes) is the same for all meshes, by
construction and not by rules for operations. Definitions keep what users state along axes of one
rank for this; `passes/meshes.py` drops it elsewhere. `execution` runs the plans of a rank's leaves
in lockstep, as the simulator does; `meeting` turns each post into parcels of bytes between ranks,
and adds terms in one tree (`tree`).
"""
