"""Word lists of the demo's generated text: plain English nouns, names and sentence parts, taken from no data set."""

from __future__ import annotations

SORTS: dict[str, tuple[str, ...]] = {
    "birds": ("robin", "wren", "finch", "heron", "crow", "owl", "swan", "lark", "gull", "stork", "eagle", "raven"),
    "trees": ("oak", "elm", "birch", "maple", "willow", "cedar", "pine", "beech", "poplar", "larch", "alder", "yew"),
    "fish": ("trout", "salmon", "cod", "carp", "pike", "tuna", "herring", "eel", "perch", "sole", "bream", "haddock"),
    "tools": ("hammer", "saw", "drill", "chisel", "wrench", "file", "axe", "rake", "spade", "pliers", "plane", "vice"),
    "fruits": ("apple", "pear", "plum", "cherry", "grape", "lemon", "peach", "fig", "melon", "mango", "lime", "date"),
    "metals": (
        "iron",
        "copper",
        "zinc",
        "tin",
        "lead",
        "gold",
        "silver",
        "nickel",
        "cobalt",
        "chrome",
        "bronze",
        "steel",
    ),
    "colours": (
        "red",
        "blue",
        "green",
        "yellow",
        "purple",
        "brown",
        "white",
        "black",
        "grey",
        "pink",
        "violet",
        "amber",
    ),
    "clothes": ("hat", "scarf", "coat", "glove", "sock", "shirt", "belt", "boot", "skirt", "vest", "shawl", "apron"),
}
"""Plural name of a sort -> its members. No member belongs to two sorts."""

SINGULAR: dict[str, str] = {
    "birds": "bird",
    "trees": "tree",
    "fish": "fish",
    "tools": "tool",
    "fruits": "fruit",
    "metals": "metal",
    "colours": "colour",
    "clothes": "garment",
}

HABITS: dict[str, tuple[str, ...]] = {
    "birds": ("sings at dawn", "builds a nest", "flew over the roof", "has feathers"),
    "trees": ("grows slowly", "lost its leaves", "stands in the park", "gives shade"),
    "fish": ("swims in the lake", "was caught in a net", "has scales", "hides under a rock"),
    "tools": ("hangs in the shed", "is made for work", "needs repair", "lies on the bench"),
    "fruits": ("tastes sweet", "is ripe now", "fell from the branch", "was sold at the market"),
    "metals": ("melts in the fire", "shines in the light", "is dug from the ground", "bends when hot"),
    "colours": ("looks fine on the wall", "fades in the sun", "is on the flag", "suits the room"),
    "clothes": ("keeps you warm", "hangs on a hook", "was washed today", "is too small"),
}

NAMES = ("Anna", "Tom", "Mary", "Ben", "Clara", "Hugo", "Nina", "Paul", "Rosa", "Sam", "Ella", "Leo")
SHE = frozenset({"Anna", "Mary", "Clara", "Nina", "Rosa", "Ella"})
PLACES = ("market", "harbour", "garden", "school", "station", "library", "farm", "village")
WEATHER = ("rain", "snow", "wind", "sunshine", "fog", "frost")
MOODS = ("happy", "tired", "hungry", "quiet", "proud", "curious")
THINGS = ("apple", "pear", "coin", "stamp", "shell", "marble", "button", "ticket")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
