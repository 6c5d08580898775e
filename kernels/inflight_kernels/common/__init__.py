"""What the kernels of several families share: argument checks, row layouts, quantisation inside a kernel.

Importing its modules imports triton, so only `<family>/gpu/` does.
"""
