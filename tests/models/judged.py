"""The survey's verdict of a model type, found once: `judge` tries the type for a tenth of a second and more."""

from __future__ import annotations

from functools import cache

from deltacompress.models.architectures.survey import judge

judged = cache(judge)
