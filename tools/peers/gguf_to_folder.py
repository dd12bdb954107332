"""A GGUF file as a Hugging Face folder in bf16, for vLLM: PYTHON gguf_to_folder.py MODEL.gguf FOLDER

Needs transformers, torch and gguf in the Python that runs it.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source, folder):
    where, name = os.path.split(os.path.abspath(source))
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    # The weights are plain floats now; what remembers the source's quantisation would refuse to save them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
