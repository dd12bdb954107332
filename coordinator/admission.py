"""From a checked request and its token ids to what the engine runs: lengths, ids and the seed."""

from __future__ import annotations

from dataclasses import dataclass

from coremill.config.errors import RequestError
from coremill.config.request import COMPLETION_MAX_TOKENS, GenerationRequest, SequenceRequest, row_seed


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit. ctx: tokens of the longest request, prompt and completion; vocab_size: token ids."""

    ctx: int
    vocab_size: int


def sequence_request(
    request: GenerationRequest, prompt_ids: tuple[int, ...], limits: Limits, run_seed: int
) -> SequenceRequest:
    """RequestError context_length_exceeded or invalid_value when the engine could not run it."""
    source = "messages" if request.kind == "chat" else "prompt"
    if not prompt_ids:
        raise RequestError("invalid_value", f"'{source}' has no tokens: it must have at least one", source)
    if not isinstance(request.prompt, str) and request.prompt is not None and max(prompt_ids) >= limits.vocab_size:
        bad = next(index for index, token in enumerate(prompt_ids) if token >= limits.vocab_size)
        raise RequestError(
            "invalid_value",
            f"'prompt.{bad}' is {prompt_ids[bad]}: the model's token ids end at {limits.vocab_size - 1}",
            f"prompt.{bad}",
        )
    sampling = request.sampling
    return SequenceRequest(
        key=request.custom_id,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(request, len(prompt_ids), limits.ctx, source),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=row_seed(run_seed, request.custom_id, sampling.seed),
        stop=tuple(stop.encode() for stop in sampling.stop),
    )


def _max_tokens(request: GenerationRequest, num_prompt: int, ctx: int, source: str) -> int:
    """The request's own limit, 16 for completions without one, the room left for chats without one."""
    room = ctx - num_prompt
    if room < 1:
        raise RequestError(
            "context_length_exceeded",
            f"'{source}' has {num_prompt} tokens: with at least one new token it must fit the context of {ctx} tokens",
            source,
        )
    asked, said = request.sampling.max_tokens, ""
    if asked is None and request.kind == "completion":
        asked, said = COMPLETION_MAX_TOKENS, " (the default)"
    if asked is None:
        return room
    if asked > room:
        raise RequestError(
            "context_length_exceeded",
            f"'{source}' has {num_prompt} tokens and 'max_tokens' is {asked}{said}, {num_prompt + asked} together: "
            f"the context has {ctx}",
            "max_tokens",
        )
    return asked
