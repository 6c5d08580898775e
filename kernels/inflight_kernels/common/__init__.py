"""Code shared by the kernels of several families: argument checks, row layouts, quantisation inside a kernel.

Importing its modules imports triton, so only `<family>/gpu/` does.
"""
