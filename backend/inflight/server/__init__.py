"""The part that runs inside tritonserver's stub process: it turns tensors into Requests and Responses into tensors.

`backend_server` accepts requests and owns `threads/`; `tensors/` says what each tensor means, `request_builder` and
`preparation` make a Request, and a `work_item` keeps it until its final response. The room `text` turns text into
tokens and back. Knows the executor's interface and nothing of how ranks compute. tritonserver's `pb_utils` is always
passed in, so that tests can pass a fake.
"""
