"""MultiMax in a language model of transformers: convert, train with the Trainer, save, load, generate.

The model is a small GPT2 with random weights, which learns to count. For a trained one, use
AutoModelForCausalLM.from_pretrained("...") instead. Run: python examples/convert_transformers.py [--steps 40]
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import multimax

WORDS, LENGTH = 50, 16


class Counting(Dataset):
    """Sequences that count up from some number, by some step."""

    def __len__(self) -> int:
        """The number of sequences."""
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One sequence."""
        ids = (index + torch.arange(LENGTH) * (1 + index % 3)) % WORDS
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """From a configuration to a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    set_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    print(multimax.convert_(model, where=("attention", "output")))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, report_to=[], disable_tqdm=True, logging_steps=10
        )
        # the Trainer's own optimizer would decay the new parameters
        optimizer = torch.optim.AdamW(multimax.param_groups(model, lr=3e-3, weight_decay=0.01, multimax_lr_factor=3))
        trainer = Trainer(model, arguments, train_dataset=Counting(), optimizers=(optimizer, None))
        trainer.add_callback(multimax.MultiMaxCallback(trainer, every=max(steps // 2, 1)))  # to TensorBoard, W&B, ...
        print(f"multimax: loss {trainer.train().training_loss:.4f} on average")

        model.save_pretrained(folder)
        model = multimax.from_pretrained(AutoModelForCausalLM, folder)
    start = torch.arange(6)[None] * 2
    print("counts on as", model.generate(start, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())
    print(f"transformer.h.0.attn: {model.transformer.h[0].attn.multimax}")


if __name__ == "__main__":
    main()
