"""Tool calls in the text of a model, found while it is written: one file for each family's format, and the grammar of
forced calls. Knows neither HTTP nor tokens."""
