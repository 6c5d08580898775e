"""Networks: a native decoder, whose architectures differ as data, and transformers' modelling code for all others.

    Network              the interface of both to the runtime
    Checkpoint           safetensors files, sliced and checked
    ModelConfig          a checkpoint's config.json, checked, for the native decoder
    Family               an architecture's tensors, how they split over ranks, and its options; one file in families/
    WeightFormat         how a checkpoint stores the weights of matrix products
    Decoder              the native network of one rank, composed as its Family says
    TransformersConfig   a checkpoint's config.json, for transformers' modelling code
    TransformersDecoder  a network of transformers with our attention

Nothing here knows requests, sampling or how a step is assembled.
"""
