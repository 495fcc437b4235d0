"""A small prompt suite of this project's own writing, so that benchmarks and the demo run anywhere.

Kinds of text differ in how well they can be guessed, so each has its own name: open chat the least, code and arithmetic
more, text that repeats its prompt the most.
"""

CHAT = (
    "Explain in a few sentences why the sky is blue during the day and red at sunset.",
    "I have an hour free every evening. Suggest three hobbies that need little money, and say what each one gives me.",
    "Write a short, friendly e-mail that asks a neighbour to water my plants while I am away for a week.",
    "What is the difference between weather and climate? Give one example of each.",
    "Write a short story of about ten sentences about a lighthouse keeper who finds a message in a bottle.",
    "List the steps for making a simple vegetable soup for four people.",
)
MATHS = (
    "A baker makes 18 loaves every morning and sells each for 4 dollars. On Monday 5 loaves stay unsold. "
    "How much money does the baker take on Monday? Think step by step.",
    "A train leaves at 9:40 and arrives at 12:15. It stands still for 20 minutes on the way. "
    "For how many minutes does it move? Explain each step.",
    "Tom has three times as many marbles as Ana. Together they have 48. How many marbles does each of them have?",
    "A garden is 12 metres long and 7 metres wide. Fence costs 9 dollars a metre. What does a fence all around cost?",
    "A shop lowers the price of a 60 dollar jacket by a quarter, then adds a tax of 10 percent. What does one pay?",
)
PYTHON = (
    "Write a Python function `is_palindrome(text)` that ignores case and everything that is not a letter.",
    "Write a Python function `count_words(path)` that returns a dictionary from each word in a text file to its count.",
    "Complete this Python function and explain it in one sentence.\n\n```python\ndef running_mean(values, width):\n"
    '    """Mean of every window of `width` neighbouring values."""\n```',
    "Write a Python function that merges two sorted lists into one sorted list without calling sort.",
    "Write a Python class `Stack` with push, pop, peek and a length, and raise an error when an empty stack is popped.",
)
OTHER_CODE = (
    "Write an SQL query that lists every customer with more than three orders in 2023, the most orders first. The "
    "tables are customers(id, name) and orders(id, customer_id, placed_on).",
    "Write a shell script that renames every .jpeg file in the current folder to .jpg and says how many it renamed.",
    "Write a JavaScript function `debounce(fn, wait)` with a comment on every line.",
)
LANGUAGES = (
    "Erkläre in drei Sätzen, warum Brot beim Backen aufgeht.",
    "Écris une courte lettre pour remercier une amie de son hospitalité.",
    "Escribe una receta sencilla de tortilla de patatas, paso a paso.",
    "用三句话解释为什么海水是咸的。",
    "Translate into French, German and Spanish: The library closes at six, but the reading room stays open until nine.",
)

_LOG = (
    "The lift in the north wing stopped between two floors and was freed after {} minutes.",
    "A visitor left {} umbrellas at the front desk; they are kept in the grey cupboard.",
    "The boiler needed {} litres of water, which is more than in the week before.",
    "Room {} was painted and has to stay empty until the smell is gone.",
    "{} chairs were carried from the hall to the garden for the reading, and back again.",
    "The gardener cut the hedge along the east path and found {} tennis balls in it.",
    "Deliveries came at {} minutes past eight and had to wait, as the gate was still locked.",
)


def _diary(days: int) -> str:
    """A caretaker's notes, a line a day: long, and different in every line."""
    lines = [f"Day {d}. " + _LOG[d % len(_LOG)].format(3 + (d * 37) % 53) for d in range(1, days + 1)]
    return "\n".join(lines)


LONG = (
    f"Here are a caretaker's notes.\n\n{_diary(40)}\n\nWhich of them are about water or heating? Name the days.",
    f"{_diary(30)}\n\nSummarise these notes of a caretaker in five sentences for the owner of the house.",
    "Read the notes and write three questions that they answer, each with its answer.\n\n" + _diary(90),
)
_TABLE = "\n".join(
    f"{name},{12 + 5 * i},{30 - 2 * i}" for i, name in enumerate(("Oslo", "Bergen", "Tromsø", "Molde", "Bodø"))
)
REPETITIVE = (
    "Repeat this text exactly, but write every number in words:\n\nWe bought 3 lamps, 12 plates and 7 spoons. The "
    "lamps cost 20 dollars each, the plates 4 dollars each and the spoons 2 dollars each. We also bought 5 cups.",
    "Rename the variable `x` to `total` in this code and give back all of it.\n\n```python\ndef add(values):\n"
    "    x = 0\n    for value in values:\n        x = x + value\n        if x > 100:\n            print('large')\n"
    "    return x\n\n\ndef mean(values):\n    x = add(values)\n    return x / len(values)\n```",
    f"Turn these lines into a JSON list of objects with the keys city, stops and price:\n\n{_TABLE}",
    "Write the numbers from 1 to 40, one a line, each followed by the word even or odd.",
    "Correct the spelling and give back the whole paragraph: Yesterday we whent to the libary to return the books. The "
    "libary was closd, so we whent to the park and red the books agian. Tomorow we will go to the libary agian.",
)
KINDS = {
    "chat": CHAT,
    "maths": MATHS,
    "python": PYTHON,
    "code": OTHER_CODE,
    "languages": LANGUAGES,
    "long": LONG,
    "repetitive": REPETITIVE,
}


def _mixed() -> tuple[tuple[str, str], ...]:
    """One of each kind in turn, so that the first few are a mixture too."""
    most = max(map(len, KINDS.values()))
    return tuple((f"{name}/{i}", texts[i]) for i in range(most) for name, texts in KINDS.items() if i < len(texts))


SUITE = _mixed()
