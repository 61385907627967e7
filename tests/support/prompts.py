"""Prompts of many kinds and lengths, for comparisons with a reference.

They have 5 to about 700 tokens of SmolLM2: less than, exactly and more than a chunk or a block of 128, and
more than a window of 512.
"""

_RIVER = (
    "The river begins as a line of wet stones high above the last farm, and for the first mile nobody would call it a river at all. "
    "By the old mill it is wide enough to need a bridge, and the bridge is old enough to need mending every spring. Children fish "
    "there for trout they never catch. Below the mill the valley opens, the water slows, and herons stand in the shallows like "
    "question marks. In the town the river turns brown and useful: it cools the brewery, carries two ferries, and floods the cellars "
    "of Dock Street once in ten years, after which the mayor promises a wall. "
)
_ENGINE = (
    "A steam engine turns heat into motion in four movements. First, water is boiled under pressure, so that it becomes steam which "
    "would like to take up a thousand times the room. Second, a valve lets that steam into a cylinder, where it pushes a piston. "
    "Third, a crank turns the straight movement of the piston into the turning of a wheel. Fourth, the spent steam is let out, cooled "
    "and returned to the boiler. Everything else about the machine, its governor, its gauges and its brass, exists to keep these four "
    "movements safe and in time with one another. "
)
_LETTER = (
    "Dear Margaret, I write to you from the kitchen of the house on Elm Road, where it has rained for eleven days. The roof holds. "
    "The cat has moved into the oven and will not be argued with. Your brother has repaired the clock, which now strikes thirteen, and "
    "he insists that this is an improvement because it gives us an hour that nobody else has. We have used it so far for tea. Please "
    "bring the blue coat when you come, and the book about bees, and if you pass the station, ask them what became of the trunk. "
)
_CODE = '''def merge(left, right):
    """Merges two sorted lists into one."""
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


'''
_TABLE = "city,country,population,founded\nLisbon,Portugal,545923,-1200\nOslo,Norway,709037,1040\nQuito,Ecuador,1763275,1534\n"

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time there",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "The three primary colours are red,",
    "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland heißt Berlin. La capitale de l'Italie est",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
    _CODE,
    _TABLE + "Nairobi,Kenya,",
    _RIVER,
    _LETTER + "I remain, with love and wet feet,",
    _ENGINE + "In short, the purpose of the valve is",
    _CODE + _CODE.replace("merge", "merge_descending").replace("<=", ">=") + "def merge_sort(values):\n",
    _RIVER + _LETTER + "The river and the letter have in common that",
    _ENGINE + _RIVER + _TABLE + "The table above lists",
    _LETTER + _ENGINE + _RIVER + "Summary:",
    _RIVER + _ENGINE + _LETTER + _CODE + _TABLE + "Explain what the function does:",
    _ENGINE
    + _LETTER
    + _RIVER
    + _CODE
    + _RIVER.replace("river", "road")
    + _LETTER.replace("Margaret", "Henry")
    + "The last paragraph is about a",
)
