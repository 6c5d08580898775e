"""Tool calls in the text of a model, found while it is written. `families` describes how each family writes calls;
parser (`call_machine` and its readers) and grammars (`chosen_guide`, `arguments_guide`) are made of that alone.
Where all output is messages, `channels` reads their headers, and `message_guide` has their grammar. Knows neither HTTP
nor tokens."""
