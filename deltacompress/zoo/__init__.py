"""The delta zoo: a store of versions that never loses, mixes up or half-shows a model.

    from deltacompress.zoo import Zoo

    zoo = Zoo.init("models.zoo")
    print(zoo.add("support-bot.delta", "team/support-bot"))  # team/support-bot@1

Imports no torch. `layout` is the format, `store` what a backend must do, `txn` why collection is safe.
"""

from deltacompress.zoo.errors import ZooError
from deltacompress.zoo.zoo import Zoo

__all__ = ["Zoo", "ZooError"]
