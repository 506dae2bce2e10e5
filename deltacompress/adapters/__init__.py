"""PEFT adapters (LoRA, BOFT): what their config says, and whether their matrices fit a base. Imports no torch."""
