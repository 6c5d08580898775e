"""A CUDA device that computes nothing, on a machine without a GPU: the engine's step runs on it as it would on a GPU.

context.py      `fake_cuda` puts a fake device in place of CUDA
device.py       the device: what is asked of it, what would make the host wait
streams.py      the order of what it is asked for
operations.py   operations of torch with its tensors
trace.py        what a step launched and copied, and what a CUDA graph of it would freeze
launches.py     one launch of a triton kernel, and which compiled kernel it needs
networks.py     networks of any size without weights, on one rank or as one of two
engine.py       a ModelRunner on the device
modes.py        requests of every kind of sampling, and the steps that serve them

Device tensors are fake tensors of torch: they have shapes, types and places, and no values. Host tensors are real.
"""
