"""The triton kernels of this family, one operation a file. Importing this imports triton."""

from inflight_kernels.rope.gpu.rope_kv_write import rope, rope_and_kv_write
from inflight_kernels.rope.gpu.rope_latent_write import rope_and_latent_write

__all__ = ["rope", "rope_and_kv_write", "rope_and_latent_write"]
