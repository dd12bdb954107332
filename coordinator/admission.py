"""From a checked request and its token ids to what the engine runs: how long it may get, and its seed."""

from __future__ import annotations

from coremill.config.errors import RequestError
from coremill.config.joboptions import JobOptions
from coremill.config.request import COMPLETION_MAX_TOKENS, GenerationRequest, SequenceRequest, row_seed

PLAIN = JobOptions()


def sequence_request(
    request: GenerationRequest, prompt_ids: tuple[int, ...], ctx: int, run_seed: int, options: JobOptions = PLAIN
) -> SequenceRequest:
    """The sequence of a request. RequestError context_length_exceeded when it has more than `ctx` tokens, prompt and
    completion together, and empty_prompt when it has none. The engine itself checks everything else."""
    source = "messages" if request.kind == "chat" else "prompt"
    if not prompt_ids:
        raise RequestError("empty_prompt", f"'{source}' has no tokens: it must have at least one", source)
    sampling = request.sampling
    seed = row_seed(run_seed, request.custom_id, sampling.seed)
    return SequenceRequest(
        key=request.custom_id,
        prompt_ids=prompt_ids,
        max_tokens=_max_tokens(request, len(prompt_ids), ctx, source),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=row_seed(seed, f"attempt-{options.attempt}", None) if options.attempt else seed,
        stop=tuple(stop.encode() for stop in sampling.stop),
        priority=options.priority,
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
