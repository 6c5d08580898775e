"""The parts that networks are made of: tensors in, tensors out. Nothing here knows a checkpoint or an architecture.

Parts are plain objects that hold tensors, not nn.Module: a module's call and attribute look-up cost some microseconds
each, hundreds of times a step.
"""
