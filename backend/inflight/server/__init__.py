"""The room inside tritonserver's stub process: tensors become Requests, Responses become tensors.

`backend_server` accepts requests and owns `threads/`; `tensors/` says what each tensor means, `text/` turns text into
tokens and back, `request_builder` and `preparation` make a Request, `work_item` holds one until its answer. Knows the
executor's interface and nothing of how ranks compute. tritonserver's `pb_utils` is always passed in, so that tests
bring their own.
"""
