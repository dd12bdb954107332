"""vLLM on the CPU over a list of prompts: PYTHON run_vllm.py JOB.json RESULT.json

Runs in the peer's own environment, so it imports nothing of ours; what the files hold is in tools/bench/program.py.
`model` is a Hugging Face folder in bf16 (gguf_to_folder.py makes one). vLLM wants its OpenMP library loaded before
anything else, and its cores named, so this program starts itself again with the variables that say so.
"""

import glob
import json
import os
import sys
import sysconfig
import time


def main(job_path, result_path):
    with open(job_path) as file:
        job = json.load(file)
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams

    strong = {"max_model_len": 4096, "enable_prefix_caching": True, "max_num_seqs": 32} if job["strong"] else {}
    model = LLM(job["model"], dtype="bfloat16", **strong)
    texts = [prompt["text"] for prompt in job["prompts"]]
    params = [SamplingParams(temperature=0, max_tokens=prompt["max_tokens"]) for prompt in job["prompts"]]
    # What happens only once is part of the start.
    model.generate(["Hello"], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    ready = time.perf_counter() - begin

    begin = time.perf_counter()
    first = 1 if job["strong"] and job["warm_prefix"] else 0
    answers = []
    for part in (slice(0, first), slice(first, None)):
        if texts[part]:
            answers += model.generate(texts[part], params[part], use_tqdm=False)
    seconds = time.perf_counter() - begin
    result = {
        "ready_seconds": ready,
        "seconds": seconds,
        "rows": len(answers),
        "errors": 0,
        "prompt_tokens": sum(len(answer.prompt_token_ids) for answer in answers),
        "completion_tokens": sum(len(answer.outputs[0].token_ids) for answer in answers),
    }
    with open(result_path, "w") as file:
        json.dump(result, file)


def prepare():
    """Starts this program again with the variables that vLLM reads before Python does."""
    if os.environ.get("PEER_READY"):
        return
    folder = os.path.dirname(sysconfig.get_paths()["stdlib"])
    found = glob.glob(os.path.join(sys.prefix, "lib", "libiomp5.so")) + glob.glob(os.path.join(folder, "libiomp5.so"))
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        "PEER_READY": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    if found:
        variables["LD_PRELOAD"] = found[0]
    os.execve(sys.executable, [sys.executable, "-I", *sys.argv], {**os.environ, **variables})


if __name__ == "__main__":
    prepare()
    main(*sys.argv[1:])
