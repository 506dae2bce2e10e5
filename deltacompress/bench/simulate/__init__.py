"""`bench simulate`: the policy of the serving engine over given times, without a model. No torch here."""
