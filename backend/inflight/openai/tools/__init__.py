"""Tool calls in the text of a model, found while it is written. `families` describes how each family writes calls;
parser (`call_machine` and its readers) and grammars (`chosen_guide`, `arguments_guide`) are made of that alone. Knows
neither HTTP nor tokens."""
