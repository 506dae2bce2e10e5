"""The calibrated part of a compression: decoder layer by decoder layer."""
