"""Speculation: what one sequence's next tokens may be, guessed on the host, so that one step verifies several of them.

    Speculation        of one sequence: asks its drafters in turn and counts what came of it
    Drafter            a source of drafts, such as
    GivenTokens        those that the request brings
    ForcedTokens       those of text that its grammar forces
    PromptLookup       what followed the last tokens earlier in the text; NGramIndex finds it
    Lookahead          what the model has sampled in places beyond the text; NGramPool keeps it
    ModelDrafts        what the draft model makes on the device, of which only the number is decided here
    Payoff             whether guessing pays, and how far ahead

Drafts never change a token, see `inflight.speculative_decoding`; so all that is decided here is how much work a step
does. Counted in tokens and steps, never in time, so that all ranks decide the same. Knows no blocks and no rows.
"""
