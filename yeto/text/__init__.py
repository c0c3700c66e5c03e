"""The causal-LM task: rows, masks, packing, model loading, LoRA, export."""
