"""The layers that networks are composed of: tensors in, tensors out. Nothing here knows checkpoints or architectures.

Layers are plain objects that hold tensors, not nn.Module: a module's call and attribute look-up cost some microseconds
each, hundreds of times per step.
"""
