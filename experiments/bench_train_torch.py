"""The other side of bench_train.py, in an environment with torch and transformers.

Takes a training step for each line that it reads, and answers with the loss.
"""

import sys

import torch
import transformers


def main(directory: str, rows: int, length: int, threads: int):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.01, fused=True
    )
    tokens = torch.randint(config.vocab_size, (rows, length))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(versions, flush=True)
    for _ in sys.stdin:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(loss.item(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
