"""Import of torch modules: capture, fold what is constant, place by names, record the nodes.

`capture` exports the module, `fold` computes constants, `place` assigns layouts to parameters and
inputs by patterns of names, `table` has a function of handles for each operation of aten, `build`
walks the graph, each node from the module's own line (`lines`), and `load` reads a rank's boxes of
a checkpoint.
"""
