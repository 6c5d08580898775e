"""Guided decoding: masks that allow a row only the tokens with which its output can still follow its grammar.

    Guidance              the ModelRunner's side: outputs of the rows, masks before each sampling; one on every rank
    Grammars              the compiled grammars and their cache; on the leader rank alone
    Output                an output that follows a grammar: its tokens, the masks of its next ones
    MaskThread            finds the masks of all rows of a step, beside the network
    library               what a library of grammars is asked for; llguidance_library, xgrammar_library answer
    forced_text           what an output must go on with, as tokens
    token_mask            masks on the device

Decisions and their reasons:

*A guide is translated where its request arrives* (inflight.guides): to the library's own grammar, or to a refusal. The
leader rank only compiles that, without Python's lock, so that no guide delays the steps of others.

*Limits count work.* llguidance counts the states, alternatives and expressions that it visits, and so do the bounds of
translation: what is refused is the same on every machine, and no thread waits for a clock.

*Only the leader rank has grammars.* It waits for the masks of a step and broadcasts them: masks are found once, not on
every rank.

*A request waits on the leader until its grammar is compiled*, outside the queue, so it delays no other request; it then
enters the queue and with it the ranks' broadcast input. Nothing is compiled on the worker loop.

*Masks are found beside the network*, by one thread that takes the work of all rows of a step together and lets Python's
lock go meanwhile.

*An output belongs to a row.* It begins when a sequence takes the row, with all its known output tokens, and gets each
token when the step that sampled it is collected. So a sequence that was paused, or whose first ranks died, needs no
more: it takes a row again, with its tokens. The results of a step that was launched before its row was given to another
sequence go to the old output, which nobody reads any more.

*Drafts get masks before anybody knows whether they are accepted*: behind each of a row's drafts the mask that it has if
they all are. The output takes them in for that and back out again, and later takes in the tokens that are kept. So a
step that verifies drafts samples what single steps would, and behind a draft that the grammar forbids no mask matters.

*Forced text is only a draft* (jump-forward). Where the grammar leaves the next text no choice, its tokens come with the
mask before them, and with the masks reach all ranks. The model may still write the text in other tokens than the
tokenizer does; and what a step samples never depends on it.
"""
