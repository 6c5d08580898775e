"""Low-rank adapters (LoRA): from a folder or a request to the slots of every rank.

    AdapterLibrary     which adapters there are; on the leader rank alone
    AdapterReader      reads one, in either way:
    peft_folder        reads a folder as PEFT saves it
    request_weights    reads the tensors of a request, in TensorRT-LLM's layout
    AdapterStore       each rank's part of every adapter, in host memory; on every rank
    device_slots       how many adapters the device holds at once

Decisions and their reasons:

*Only the leader reads adapters*, on a thread of its own, and checks them against its network. So a folder that is wrong
costs its own requests an error and nothing else: what reaches the other ranks is valid. A request waits on the leader,
outside the queue, until its adapter is loaded.

*All ranks store what the leader orders*, in the broadcast input of an iteration, a few megabytes at a time, so that a
large adapter stops no step for long. Each rank keeps its own part of the matrices. The leader also decides what is
dropped, as only it knows which requests are in flight.

*The scheduler of every rank decides which adapter is in which slot of the device*, by the same rules from the same
requests. A step names the slots that it fills first. An adapter that a running sequence uses stays in its slot.
"""
