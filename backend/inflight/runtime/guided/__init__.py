"""Guided decoding: masks that allow a row only the tokens with which its output can still follow its grammar.

    Guidance           the ModelRunner's side: matchers of the rows, masks before each sampling; one on every rank
    Grammars           the compiled grammars and their cache; on the leader rank alone
    Grammar            the leader's side of one compiled grammar, which lives in a process of its own
    grammar_server     that process, and the one it is forked from
    compiling          in it, from what the request asks to a compiled grammar
    trial              outputs that are followed before any request's is
    matchers           the outputs that follow the grammar
    forced_text        what they must go on with, as tokens
    token_mask         masks on the device

Decisions and their reasons:

*A grammar lives in a process of its own.* Compiling is not the only danger: XGrammar keeps all readings of the output
so far, and an expression of twenty characters can compile in a millisecond and take a second for its sixteenth token.
No limit of the library prevents that, and a thread cannot be stopped. A process can be killed, with all of its memory.
Its masks are computed while the network runs, on another core, and never hold the interpreter's lock.

*Only the leader rank has grammars.* It waits for the masks of a step and broadcasts them, so that what depends on its
clock (a grammar that was too slow) reaches all ranks alike. The other ranks do not even import the library.

*A request waits on the leader until its grammar is compiled*, outside the queue, so it delays no other request; it then
enters the queue and with it the ranks' broadcast input. Nothing is compiled on the worker loop.

*What is said to all rows of a grammar travels in one packet*, and so do their masks, unless they take the process
longer than a few milliseconds: otherwise the leader's worker loop would be woken once for each row.

*A matcher belongs to a row.* It is made when a sequence takes the row, from all its known output tokens, and gets each
token when the step that sampled it is collected. So a sequence that was paused, or whose first ranks died, needs no
more: it takes a row again, with its tokens. The results of a step that was launched before its row was given to another
sequence go to the old matcher, which nobody reads any more. A matcher is closed when its row is taken, or with the last
request in flight that uses its grammar.

*Drafts get masks before anybody knows whether they are accepted*: behind each of a row's drafts the mask that it has if
they all are. The matcher takes them in for that and back out again, and later takes in the tokens that are kept. So a
step that verifies drafts samples what single steps would, and behind a draft that the grammar forbids no mask matters.

*Forced text is only a draft* (jump-forward). Where the grammar leaves the next text no choice, its tokens come with the
mask before them, and with the masks reach all ranks. The model may still write the text in other tokens than the
tokenizer does; and what a step samples never depends on it.

Bounds: see the constants of `grammar` and `grammars`. A grammar that exceeds one costs its own requests an error. Its
compiling delays no step; a mask delays one step by at most MASK_SECONDS, once, and a trial walk after compiling refuses
nearly all grammars that would.
"""
