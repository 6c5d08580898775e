"""Models of the Hugging Face hub by their names: fetched once, by one process, before any rank starts.

Everything behind this room reads folders and knows nothing of a hub. A folder lies in the cache that other programs of
Hugging Face use, too, under the commit of its files, so that it never changes.
"""
