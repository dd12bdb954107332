"""OpenVINO GenAI over a list of prompts: PYTHON run_openvino.py JOB.json RESULT.json

Runs in the peer's own environment, so it imports nothing of ours; what the files hold is in tools/bench/program.py.
"""

import json
import sys
import time

import openvino_genai as genai

# The best settings found for batches on two cores. Without `strong`: the scheduler as it comes.
STRONG = {
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
    "dynamic_split_fuse": True,
    "cache_size": 3,
}


def main(job_path, result_path):
    with open(job_path) as file:
        job = json.load(file)
    texts = [prompt["text"] for prompt in job["prompts"]]
    limits = {prompt["max_tokens"] for prompt in job["prompts"]}
    if len(limits) > 1:
        sys.exit(f"rows have {len(limits)} different max_tokens: LLMPipeline takes one for all")
    begin = time.perf_counter()
    scheduler = genai.SchedulerConfig()
    for name, value in STRONG.items() if job["strong"] else ():
        setattr(scheduler, name, value)
    pipeline = genai.LLMPipeline(job["model"], "CPU", scheduler_config=scheduler)
    config = greedy(limits.pop())
    # What happens only once is part of the start.
    pipeline.generate(["Hello"], greedy(1))
    ready = time.perf_counter() - begin
    prompt_tokens = sum(pipeline.get_tokenizer().encode(text).input_ids.shape[1] for text in texts)

    begin = time.perf_counter()
    first = 1 if job["strong"] and job["warm_prefix"] else 0
    answers = [pipeline.generate(part, config) for part in (texts[:first], texts[first:]) if part]
    seconds = time.perf_counter() - begin
    result = {
        "ready_seconds": ready,
        "seconds": seconds,
        "rows": sum(len(answer.texts) for answer in answers),
        "errors": 0,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sum(answer.perf_metrics.get_num_generated_tokens() for answer in answers),
    }
    with open(result_path, "w") as file:
        json.dump(result, file)


def greedy(max_tokens):
    config = genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.do_sample = False
    config.apply_chat_template = False
    return config


if __name__ == "__main__":
    main(*sys.argv[1:])
