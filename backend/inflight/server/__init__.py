"""The room inside tritonserver's stub process: tensors become Requests, Responses become tensors.

Reads from the door inwards: `dialect` (what the tensors mean), `request_builder` (defaults, tokens), `work_item` (one
request in our hands), `backend_server` (who accepts, sends, watches and measures). Knows the executor's interface and
nothing of how ranks compute. tritonserver's `pb_utils` is always passed in, so that tests bring their own.
"""
