"""The rows of the op table, by family; `mdfuse/ir/ops.py` reads them all."""
