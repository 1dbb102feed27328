"""Write a model of random weights with the tokens and the kind of another one.

python evidence/prove/new_model.py --like student --layers 3 --hidden 192 --output small
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

HEAD = 64


def main() -> None:
    """Write one folder; `vocag train --random-init` reads its configuration alone."""
    parser = argparse.ArgumentParser(description="Write a model of random weights.")
    parser.add_argument("--like", type=Path, required=True, help="a folder: tokens and kind")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True, help="a multiple of 192")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    config = AutoConfig.from_pretrained(options.like, trust_remote_code=False)
    config.num_hidden_layers, config.hidden_size = options.layers, options.hidden
    # SmolLM2's proportions: three query heads for each of keys and values.
    config.num_attention_heads = options.hidden // HEAD
    config.num_key_value_heads = options.hidden // HEAD // 3
    config.head_dim, config.intermediate_size = HEAD, 8 * options.hidden // 3
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * options.layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.save_pretrained(options.output)
    for path in options.like.glob("token*"):
        shutil.copy(path, options.output)


if __name__ == "__main__":
    main()
