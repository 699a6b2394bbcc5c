"""A Llama-shaped checkpoint of a few hundred kilobytes with a real tokenizer, made without a network."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUCKET", "tiny_model"]

BUCKET = "16"  # the one shape that tests compile, as `--shape-buckets` takes it
_WORDS = "the capital of france is paris what who where a b c d ? . hello"


def tiny_model(folder: Path, *, seed: int = 0, hidden: int = 64) -> Path:
    """Write the checkpoint to the new folder `folder`: two layers, random weights from `seed`; the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: at for at, word in enumerate(["<unk>", "</s>", *_WORDS.split()])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=vocabulary["</s>"],
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
