"""The APIs of clients: each reads bodies of its own, and writes answers and errors in its form."""
