"""PEFT adapters (LoRA, DoRA, BOFT, SHiRA, RoSA): what each is, module by module, held against a base. No torch."""
