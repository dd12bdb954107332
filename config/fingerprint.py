"""What the tokens of a request depend on besides the request itself."""

from __future__ import annotations

import hashlib

# Raised by every change that may change a bit of any logit, or the draw made from them.
NUMERICS_VERSION = 1


def system_fingerprint(model_key: str, kv: str) -> str:
    """OpenAI's `system_fingerprint`: equal fingerprints promise equal tokens for equal requests and seeds.

    model_key: content key of the packed model; kv: type of the KV cache.
    """
    text = f"{model_key} {kv} {NUMERICS_VERSION}"
    return "fp_" + hashlib.blake2b(text.encode(), digest_size=8, person=b"coremill.fp").hexdigest()


def text_digest(text: str | None) -> str:
    """Short stable name of a text such as a chat template; "none" for no text."""
    if text is None:
        return "none"
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"coremill.text").hexdigest()
