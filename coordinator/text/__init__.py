"""Text to token ids and back: tokenizers, chat templates, and the helper process that runs both on untrusted input."""
