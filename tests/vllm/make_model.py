"""Make two versions of a tiny model: `make_model.py FOLDER`, with the Python of vLLM's environment.

The model is a Qwen 3 with half a million parameters, trained for some seconds to answer any prompt with one
tool call; the versions differ in the command. FOLDER holds `conversations.json` with token ids (one list per
version) and the tokenizer's files; FOLDER/one and FOLDER/two become the versions.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

_STEPS, _BATCH, _WIDTH = 80, 4, 160


def main(folder: Path) -> None:
    given = json.loads((folder / "conversations.json").read_text())
    torch.set_num_threads(1)  # the machine may be busy, and the model is tiny
    for name, conversations in given["versions"].items():
        model = _trained(conversations, given["vocab_size"], given["eos_id"])
        model.save_pretrained(folder / name)
        for file in (folder / "tokenizer").iterdir():
            shutil.copy(file, folder / name)


def _trained(conversations: list[list[int]], vocab_size: int, eos_id: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # vLLM 0.32 keeps the old last layer if it is the embedding's
        eos_token_id=eos_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    chance = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        chosen = torch.randint(len(conversations), (_BATCH,), generator=chance).tolist()
        # The ends matter most: an answer, and the text before it.
        rows = torch.tensor([conversations[index][-_WIDTH:] for index in chosen])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]))
