"""How models answer: one interface of scorers, the panel that asks them together, fidelity and paired statistics."""
