"""The room inside tritonserver's stub process: tensors become Requests, Responses become tensors.

`backend_server` accepts requests and owns `threads/`; `tensors/` says what each tensor means, `request_builder` and
`preparation` make a Request, `work_item` holds one until its answer. Text is turned into tokens and back by the room
`text`. Knows the executor's interface and nothing of how ranks compute. tritonserver's `pb_utils` is always passed in,
so that tests bring their own.
"""
