"""Ways to encode one tensor, and the formats they write.

A *codec* (obs, rtn, counted, bitdelta, low-rank, exact, skip) decides values; a *format* (packed, low_rank, exact,
none) says how parts decode. Codecs that quantize share the packed format, so one decoder serves them all. `settings` is
what a recipe can say about each.
"""
