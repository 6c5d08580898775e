"""An answer that follows a JSON schema, whatever the model would rather say.

python client/examples/guided_json.py [localhost:8001]
"""

from __future__ import annotations

import json
import sys

from inflight_client import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "duck"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
}

with Client(*sys.argv[1:2]) as client:
    answer = client.generate(
        "There was a girl.",
        max_tokens=120,
        bad_words=["\n"],  # JSON may have any white space between its parts, and this model likes it
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide=json.dumps(SCHEMA),
    )
    print(json.loads(answer.text))
