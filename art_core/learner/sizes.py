"""Sizes of models from which training works differently."""

SMALL_MODEL = 10_000_000
"""Parameters below which torch gets one thread, and a higher learning rate. On cores that others use too, waiting for a second
thread took up to 15 times as long as the step."""
LORA_FROM, LORA_RANK = 100_000_000, 16
"""Parameters from which a LoRA adapter is trained if ``lora_rank`` is None, and the rank of that adapter."""
